"""A referee for any server: what it answers is computed again, and judged."""
