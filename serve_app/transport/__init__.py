"""How handoffs get from a prefill replica to a decode replica."""
