"""The app that ``llorch up`` gives to Flower.

Not ``tasks``: celery looks in the current folder first, which may have a ``tasks.py`` of its own.
"""

from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

app = build_app(Settings())
"""The app, configured from ``LLORCH_*``."""
