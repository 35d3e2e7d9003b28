"""Requests to servers with OpenAI's API, and their replies: one reader and the clients."""
