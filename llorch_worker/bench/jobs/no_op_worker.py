"""``python -m llorch_worker.bench.jobs.no_op_worker``: the whole worker around a model that
computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llorch_worker.bench.instruments.no_op_model import NoOpModel, no_op_engine
from llorch_worker.engine import Engine
from llorch_worker.settings import Settings
from llorch_worker.worker.main import run_worker

VOCABULARY = 512
CONTEXT_TOKENS = 64


class NoOpEngine:
    """Loads what the worker would load from a file."""

    @classmethod
    def load(
        cls,
        path: Path,  # noqa: ARG003 - the worker's call
        *,
        max_sequences: int,
        progress: Callable[[int, int], None] | None = None,
        **_: Any,
    ) -> Engine:
        """An engine for ``max_sequences`` sequences of up to 64 tokens."""
        # The products that there are not need no threads.
        torch.set_num_threads(1)
        if progress is not None:
            progress(1, 1)
        model = NoOpModel(VOCABULARY, max_sequences, seed=0)
        return no_op_engine(
            model, VOCABULARY, sequences=max_sequences, context_tokens=CONTEXT_TOKENS
        )


if __name__ == "__main__":
    run_worker(Settings(), engine_class="llorch_worker.bench.jobs.no_op_worker:NoOpEngine")
