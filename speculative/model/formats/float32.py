"""Weights in float32."""

from speculative.model.formats import Format

FORMAT = Format("float32")
