"""Runs one step eagerly: the target's forward pass, sampling with verification, and the copy to the host."""
