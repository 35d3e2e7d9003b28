"""Legacy completions: their requests, and the echo of prompts."""
