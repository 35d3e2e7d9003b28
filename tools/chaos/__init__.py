"""Kill replicas while clients stream, load the service beyond what it can do, and say what came of it."""
