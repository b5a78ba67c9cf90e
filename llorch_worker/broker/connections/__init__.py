"""Connections to Redis: URLs, Sentinel, limits of time, outages."""
