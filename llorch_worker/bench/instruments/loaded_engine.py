"""An engine with room for a load and nothing more, and a watch on its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llorch_worker.bench.instruments.passes import Load
from llorch_worker.bench.instruments.watched_model import WatchedModel
from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.block_plan import BLOCK_SIZE_TOKENS
from llorch_worker.engine.memory.model_report import ModelReport, report
from llorch_worker.engine.runner import ForwardModel
from llorch_worker.settings import Settings


@dataclass(frozen=True)
class LoadedEngine:
    """What passes run on. It is idle between them."""

    engine: Engine
    watched: WatchedModel
    report: ModelReport
    load_s: float

    def no_room(self, load: Load) -> str | None:
        """Why the load's requests cannot all be in the KV cache at once; None where they can."""
        needed, there_are = _blocks_for_all(load), self.engine.cache.blocks.total
        if needed <= there_are:
            return None
        return f"needs {needed} KV blocks at once, and memory holds {there_are}"


@contextmanager
def engine_for(
    settings: Settings,
    largest: Load,
    threads: int | None,
    progress: Callable[[int, int], None],
) -> Iterator[LoadedEngine]:
    """Loads the model of ``settings`` for loads up to ``largest``; ``progress`` in bytes.

    Raises:
        CommandError: the load is longer than the model's context, or the model with one context
            does not fit into memory.
    """
    watches: list[WatchedModel] = []

    def watch(model: ForwardModel) -> WatchedModel:
        watches.append(WatchedModel(model))
        return watches[0]

    model = _checked_model(settings, largest)
    began_s = time.perf_counter()
    with Engine.load(
        settings.model,
        settings.device,
        settings.dtype,
        max_sequences=largest.concurrency,
        num_threads=threads,
        progress=progress,
        around_model=watch,
        **settings.engine_options
        | {
            "max_context": model.memory.max_context_tokens,
            "kv_cache_bytes": _kv_bytes(largest, model),
        },
    ) as engine:
        yield LoadedEngine(engine, watches[0], model, time.perf_counter() - began_s)


def _blocks(load: Load) -> int:
    """KV blocks of one request of the load at its end."""
    return -(-(load.prompt_tokens + load.new_tokens) // BLOCK_SIZE_TOKENS)


def _blocks_for_all(load: Load) -> int:
    """So many that no request of the load waits: the scheduler keeps a block free for each."""
    return load.concurrency * (_blocks(load) + 1)


def _checked_model(settings: Settings, load: Load) -> ModelReport:
    """The model's report for the context that the load needs."""
    wanted = load.prompt_tokens + load.new_tokens
    own = report(settings).context_tokens
    if wanted > own:
        raise usage_error(
            f"prompts of {load.prompt_tokens} tokens and {load.new_tokens} new ones exceed the "
            f"model's context of {own} tokens"
        )
    context = min(own, _blocks(load) * BLOCK_SIZE_TOKENS)
    one = {"max_context": context, "max_sequences": 1, "kv_cache_bytes": None}
    found = report(settings.model_copy(update=one))
    memory = found.memory
    if not memory.fits:
        raise CommandError(
            "OUT_OF_MEMORY",
            f"{settings.model} needs {human_bytes(memory.total_bytes)} as {memory.kept_as} for "
            f"one sequence and {human_bytes(memory.free_bytes)} are free on {memory.device}; "
            "take a smaller dtype or model",
        )
    return found


def _kv_bytes(load: Load, model: ModelReport) -> int:
    """For the whole load; the engine takes less where there is not so much."""
    one_context_blocks = -(-model.memory.max_context_tokens // BLOCK_SIZE_TOKENS)
    one_context_bytes = model.memory.kv_bytes / model.memory.full_contexts
    return round(one_context_bytes / one_context_blocks * _blocks_for_all(load))
