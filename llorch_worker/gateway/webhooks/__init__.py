"""Webhooks: telling a URL that something has ended, at least once."""
