"""The Responses API on top of chat: items and requests in, response objects and events out, kept responses."""
