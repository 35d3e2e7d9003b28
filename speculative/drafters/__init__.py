"""Drafters: cheap guesses of the next tokens. None imports another."""
