"""An engine whose steps do what a token of a prompt asks for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import InternalError
from llorch_worker.engine import Engine
from llorch_worker.engine.generation import Generation
from llorch_worker.intake.constraints import schema_check
from llorch_worker.intake.constraints.compiler import Compiler
from llorch_worker.model import ForwardModel, RaggedBatch

SEGFAULT, RAISE, HANG, NOISE, REFUSED = range(300, 305)


class FaultyEngine:
    @staticmethod
    def load(*arguments: Any, **options: Any) -> Engine:
        return Engine.load(*arguments, **options, around_model=FaultyModel)


class RefusingEngine(Engine):
    """It finds something wrong with :data:`REFUSED`, which every intake takes."""

    def submit(self, request: Any, **options: Any) -> Generation:
        if getattr(request, "prompt_ids", None) == [1, REFUSED]:
            raise InternalError("refused")
        return super().submit(request, **options)


class WaitingChecks:
    """Each check of a finished text waits; see :func:`_behind_the_gate`."""

    @staticmethod
    def load(*arguments: Any, **options: Any) -> Engine:
        schema_check.broken = _behind_the_gate(schema_check.broken)
        return Engine.load(*arguments, **options)


class WaitingGrammars:
    """So does each compilation of a grammar."""

    @staticmethod
    def load(*arguments: Any, **options: Any) -> Engine:
        Compiler._in_time = _behind_the_gate(Compiler._in_time)  # type: ignore[method-assign]
        return Engine.load(*arguments, **options)


def _behind_the_gate(function: Callable[..., Any]) -> Callable[..., Any]:
    """Waits for the file ``GATE``, and notes in ``<GATE>.waits-<thread>`` that it does."""

    def waits(*arguments: Any) -> Any:
        gate = os.environ["GATE"]
        Path(f"{gate}.waits-{threading.get_ident()}").touch()
        while not os.path.exists(gate):
            threading.Event().wait(0.01)
        return function(*arguments)

    return waits


class DyingEngine:
    """It is killed while it loads, with something unread in its connection."""

    @staticmethod
    def load(*_: Any, **__: Any) -> Engine:
        select.select([_connection()], [], [])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def _connection() -> int:
    return next(each for each in range(3, 100) if _is_socket(each))


def _is_socket(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    return False


class FaultyModel:
    def __init__(self, model: ForwardModel) -> None:
        self._model = model

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        asked = set(batch.token_ids.tolist())
        if SEGFAULT in asked:
            ctypes.string_at(0)
        if RAISE in asked:
            # Not of a step: it ends the engine's thread, as a lost card does.
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nat 0xdead")
        if HANG in asked:
            threading.Event().wait()
        if NOISE in asked:
            _write_into_the_connection()
        return self._model.forward(batch, cache)


def _write_into_the_connection() -> None:
    for descriptor in range(3, 100):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(
                    descriptor, b"what a library prints to the descriptor that it holds for its"
                )
    signal.pause()
