"""The toy worker on a machine whose memory holds one engine."""

from __future__ import annotations

from typing import Literal

from llorch_worker.engine.process.engine_process import EngineProcess
from llorch_worker.worker.engine_loader import EngineLoader
from llorch_worker.worker.reloader import Reloader
from tests.toy_app import app as app


def _judge(
    reloader: Reloader, model: str, old: EngineProcess, new: EngineLoader
) -> Literal["stay", "beside", "after"]:
    return "after"


Reloader._judge = _judge  # type: ignore[method-assign]
