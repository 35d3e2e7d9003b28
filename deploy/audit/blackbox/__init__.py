"""The black-box audit: what can be found out about any OpenAI-compatible server by asking it."""
