"""The real engine, in which the jobs of a kind, ``HELD``, are no work while the file ``CLOSED``
exists.

Once it is gone, what comes next makes the engine look again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llorch_worker.engine.any_engine import AnyEngine as Engine
from llorch_worker.engine.core import EngineCore
from llorch_worker.engine.texts_core import TextsCore

CLOSED = Path(os.environ["CLOSED"])
_HELD: Any = {"texts": TextsCore, "generation": EngineCore}[os.environ["HELD"]]
_has_work = _HELD.has_work.fget


def has_work(self: Any) -> bool:
    return not CLOSED.exists() and bool(_has_work(self))


_HELD.has_work = property(has_work)
__all__ = ["Engine"]
