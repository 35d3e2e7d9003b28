"""Which sequences enter a step, how much is drafted for each, and what is committed."""
