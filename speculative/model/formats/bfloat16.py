"""Weights in bfloat16."""

from speculative.model.formats import Format

FORMAT = Format("bfloat16")
