"""Updates of the weights while the service runs."""
