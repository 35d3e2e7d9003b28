"""Which replica takes a request, and how many replicas there are."""
