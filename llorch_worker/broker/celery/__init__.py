"""What Celery and kombu call: the result backend, the transport, a producer's application."""
