"""Who may ask, how much, and how many at once: API keys, quotas and admission."""
