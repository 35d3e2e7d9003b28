"""The cache of computed keys and values: paged blocks, and the names by which equal prefixes are found."""
