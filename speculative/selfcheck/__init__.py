"""Self-checks: what an engine watches of itself while it serves, and what a replay can tell."""
