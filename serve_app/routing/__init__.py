"""Routing: the replica that takes a request, and the number of replicas."""
