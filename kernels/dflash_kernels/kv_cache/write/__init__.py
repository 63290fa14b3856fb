"""Writing new keys and values into their page slots, in place inside a donated program."""
