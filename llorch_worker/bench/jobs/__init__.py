"""Loads of jobs, and the services that run them: Redis, workers of ours and of stock Celery."""
