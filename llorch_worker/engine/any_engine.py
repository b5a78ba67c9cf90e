"""The engine of any model file: what it holds decides which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llorch_worker.engine.embedding_engine import EmbeddingEngine
from llorch_worker.engine.engine import Engine
from llorch_worker.engine.memory.encoder_plan import is_for_texts
from llorch_worker.engine_options import EngineOptions
from llorch_worker.weights import open_checkpoint


class AnyEngine:
    """Not an engine: its :meth:`load` makes one."""

    @staticmethod
    def load(
        path: str | Path, options: EngineOptions | None = None, **others: Any
    ) -> Engine | EmbeddingEngine:
        """An :class:`.EmbeddingEngine` of a model for texts alone, else an :class:`.Engine`; see
        there."""
        checkpoint = open_checkpoint(Path(path))
        options = options or EngineOptions()
        kind = EmbeddingEngine if is_for_texts(checkpoint, options) else Engine
        return kind.load(path, options, checkpoint=checkpoint, **others)
