"""An engine with just enough room for a load, and a watched model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llorch_worker.bench.instruments.watched_model import WatchedModel
from llorch_worker.bench.load import Load
from llorch_worker.bench.plan import Plan
from llorch_worker.cache import BLOCK_SIZE_TOKENS
from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import LoadPlan, plan_load
from llorch_worker.model import ForwardModel, resolve_config
from llorch_worker.settings import Settings
from llorch_worker.weights import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class LoadedEngine:
    """An engine to run loads on. It is idle between them."""

    engine: Engine
    watched: WatchedModel
    checkpoint: Checkpoint
    load_s: float


@contextmanager
def engine_for(plan: Plan, largest: Load) -> Iterator[LoadedEngine]:
    """Load the plan's model for loads up to ``largest``.

    Raises:
        CommandError: the load is longer than the model's context, or the model with one context
            does not fit into memory.
        LlorchError: the KV blocks of the whole load do not fit.
    """
    watches: list[WatchedModel] = []

    def watch(model: ForwardModel) -> WatchedModel:
        watches.append(WatchedModel(model))
        return watches[0]

    settings = plan.settings
    fitting = _checked_plan(settings, largest)
    options = replace(
        settings.engine_options,
        max_sequences=largest.jobs,
        max_context=fitting.shape.max_context,
        drafter="off",  # What guesses gain depends on the text: these prompts are random.
    )
    kv_cache_bytes = plan_load(settings.model, options).kv_bytes(_blocks_for_all(largest))
    began_s = time.perf_counter()
    with Engine.load(
        settings.model,
        options,
        num_threads=plan.threads,
        progress=plan.progress,
        around_model=watch,
        kv_cache_bytes=kv_cache_bytes,
    ) as engine:
        yield LoadedEngine(engine, watches[0], fitting.checkpoint, time.perf_counter() - began_s)


def own_context(settings: Settings) -> int:
    """The most tokens that the model of ``settings`` can hold."""
    return resolve_config(open_checkpoint(settings.model)).max_context


def _blocks(load: Load) -> int:
    """KV blocks that one request of the load holds at its end."""
    return -(-load.longest_tokens // BLOCK_SIZE_TOKENS)


def _blocks_for_all(load: Load) -> int:
    """KV blocks with which no request waits: the scheduler keeps a block free for each."""
    return load.jobs * (_blocks(load) + 1)


def _checked_plan(settings: Settings, load: Load) -> LoadPlan:
    """The plan of a load with one context as long as ``load`` needs."""
    own = own_context(settings)
    if load.longest_tokens > own:
        raise usage_error(
            f"prompts of {load.prompt_tokens[1]} tokens and {load.new_tokens[1]} new ones exceed "
            f"the model's context of {own} tokens"
        )
    context = min(own, _blocks(load) * BLOCK_SIZE_TOKENS)
    one = replace(
        settings.engine_options, max_context=context, max_sequences=1, kv_cache_bytes=None
    )
    plan = plan_load(settings.model, one)
    if plan.misfit:
        raise CommandError(
            "OUT_OF_MEMORY",
            f"{settings.model} needs {human_bytes(plan.total_bytes)} as {plan.kept_as} for "
            f"one sequence and {human_bytes(plan.free_bytes)} are free on {plan.device}; "
            "take a smaller dtype or model",
        )
    return plan
