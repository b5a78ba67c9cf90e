"""The toy worker, which tries a model soon again that did not load."""

from __future__ import annotations

from llorch_worker.worker import model_changer
from tests.toy_app import app as app

model_changer.ASIDE_S = 0.1  # type: ignore[misc]
