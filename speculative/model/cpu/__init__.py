"""Layers as the CPU kernels run them."""
