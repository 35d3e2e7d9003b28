"""What a step computes over the vocabulary, by torch's operators or by our CPU kernels: chosen once per engine."""
