"""Scheduling: the sequences of a step, the number of drafts for each, and what is committed."""
