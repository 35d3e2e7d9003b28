"""Proposes tokens: the `Drafter` protocol, drafters with a model, and what makes one of each `speculative.lookup`.

Knows sequences and models; knows no verification.
"""
