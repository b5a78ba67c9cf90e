"""Anthropic's Messages API, by translation from and to chats. No HTTP, no Redis, no torch."""
