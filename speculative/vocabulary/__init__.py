"""The arithmetic of a step over the vocabulary, by torch's operators or by our CPU kernels: chosen once per engine."""
