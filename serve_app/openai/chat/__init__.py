"""Chat completions: messages, what the template shows of them, tools and reasoning of a request."""
