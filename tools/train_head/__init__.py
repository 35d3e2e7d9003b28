"""Trains EAGLE-3 heads on what the target itself writes: how the head that comes with the package was made."""
