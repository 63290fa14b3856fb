"""Eight- and four-bit forms of an activation, for a layer whose output the next matrix reads quantised."""
