"""The engines of a worker on a machine whose clock is wrong."""

from __future__ import annotations

from typing import Any

import tests.faults.skewed_clock  # noqa: F401 - sets the clock of the engine's process


def __getattr__(name: str) -> Any:
    if name == "ToyEngine":
        from tests.toy_engine import ToyEngine

        return ToyEngine
    from llorch_worker.engine import Engine

    return Engine
