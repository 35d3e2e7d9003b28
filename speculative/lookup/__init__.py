"""Drafters without weights, one a file: each registers itself with its options. Knows sequences; knows no torch."""
