"""Metrics for Prometheus: of a worker, of a gateway, and of the whole fleet."""
