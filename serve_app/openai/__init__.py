"""OpenAI's API over a token source: a folder for each endpoint and for tool calls, and what they share."""
