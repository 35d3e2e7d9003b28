"""Before a service runs and while it does: checks of the machine, ports, clusters, the demo."""
