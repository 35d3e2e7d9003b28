"""One module an engine: each runs in a process of its own, some under another interpreter."""
