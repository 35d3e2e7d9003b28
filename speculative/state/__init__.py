"""Sequences between steps, a step's batch, and what limits which tokens may come next."""
