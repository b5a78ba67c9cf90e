"""Webhooks: posting to a URL that something has ended, at least once."""
