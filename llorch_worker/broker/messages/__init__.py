"""Jobs as Celery's messages, written and read."""
