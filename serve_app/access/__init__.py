"""Access: API keys, quotas and admission."""
