"""Trains draft heads on what the target itself writes."""
