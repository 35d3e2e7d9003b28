"""The server: Ray Serve pools, an OpenAI-compatible front end, metrics."""
