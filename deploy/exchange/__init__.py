"""Requests to servers with OpenAI's API: the clients, their prompts and what they ask."""
