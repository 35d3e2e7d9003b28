"""Watches replicas and acts on it: replays, verdicts, detectors, the breaker and its canaries."""
