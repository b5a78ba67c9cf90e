"""The Celery application: ``celery -A llorch_worker.tasks worker``. No torch.

Producers write ``from llorch_worker.tasks import generate``. In a checkout ``tasks`` is the same.
"""

from llorch_worker.contract import TASK_NAME
from llorch_worker.worker.celery.app import build_from_environment

app = build_from_environment(__name__, "tasks")
"""The app, configured from ``LLORCH_*``."""
generate = app.tasks[TASK_NAME]
"""The task, for producers: ``generate.delay(prompt="Once upon a time", max_tokens=64)``."""

__all__ = ["app", "generate"]
