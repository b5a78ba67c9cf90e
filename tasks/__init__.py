"""``llorch_worker.tasks`` under a short name, in a checkout only: ``celery -A tasks worker``."""

from llorch_worker.tasks import app, generate

__all__ = ["app", "generate"]
