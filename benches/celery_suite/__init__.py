"""Celery's own integration tests, run against this package's worker and against stock Celery."""
