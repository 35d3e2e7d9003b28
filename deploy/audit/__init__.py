"""The audit: known faults are put back into engines, to see which detector finds each of them, and when."""
