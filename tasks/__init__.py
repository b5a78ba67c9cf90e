"""The Celery application: ``celery -A tasks worker``; ``from tasks import generate``. No torch."""

from llorch_worker.contract import TASK_NAME
from llorch_worker.worker.celery.app import build_from_environment

app = build_from_environment(__name__)
"""The app, configured from ``LLORCH_*``."""
generate = app.tasks[TASK_NAME]
"""The task, for producers: ``generate.delay(prompt="Once upon a time", max_tokens=64)``."""

__all__ = ["app", "generate"]
