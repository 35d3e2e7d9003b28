"""Known faults put back into an engine, and whether the checks find them. Not in the images."""
