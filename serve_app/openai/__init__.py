"""OpenAI's API over a token source: requests in, responses out, chat, tools and scoring."""
