"""A worker: one process, one device, one resident engine, jobs from Celery."""
