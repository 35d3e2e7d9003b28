"""Access: API keys, and the gate before the routes."""
