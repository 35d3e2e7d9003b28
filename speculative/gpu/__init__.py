"""The step as captured graphs: fixed shapes, static buffers, one copy to the host."""
