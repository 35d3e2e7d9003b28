"""Where computed keys and values lie: paged blocks, and the names by which equal prefixes are found."""
