"""Streams of token deltas over replicas: pooled, observed, resumed and merged."""
