"""Keys of an indexer in eight bits."""
