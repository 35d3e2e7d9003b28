"""Transports of handoffs from a prefill replica to a decode replica."""
