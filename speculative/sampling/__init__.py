"""From logits to probabilities, random numbers and logprobs. Knows tensors and parameters, not steps."""
