"""Parts of an engine: one real model, caches of any size, sequences without text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine.device.queue import DeviceQueue, InlineQueue
from llorch_worker.engine.loading import LoadedModel as InMemory
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine_options import EngineOptions
from llorch_worker.kernels import TorchOps
from llorch_worker.model import ModelConfig, RaggedBatch, Transformer, resolve_config
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.weights import DenseLinears, open_checkpoint
from tests.engine.lazy_queue import LazyQueue


@dataclass(frozen=True)
class LoadedModel:
    """A real model, and engines of it with any cache and, for faults, any forward pass."""

    path: Path
    model: Transformer
    config: ModelConfig
    tokenizer: Tokenizer

    def cache(self, num_blocks: int, max_context: int | None = None, **sizes: int) -> UnifiedCache:
        shape = cache_shape(
            self.config,
            max_context or self.config.max_context,
            dtype=torch.float32,
            device=torch.device("cpu"),
            **sizes,
        )
        return UnifiedCache.allocate(shape, num_blocks)

    def engine(
        self,
        *,
        num_blocks: int = 512,
        model: Any = None,
        num_threads: int | None = None,
        queue: DeviceQueue | None = None,
        **options: Any,
    ) -> Engine:
        chosen = EngineOptions(**options)
        cache = self.cache(
            num_blocks,
            max_sequences=chosen.sequences,
            max_step_tokens=chosen.step_tokens,
        )
        return Engine(
            InMemory(self.model, cache, model or self.model),
            tokenizer=self.tokenizer,
            model_name="stories",
            options=chosen,
            num_threads=num_threads,
            queue=queue,
        )


def continuation(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    """The text that ``token_ids`` add to a text before them."""
    return tokenizer.decode([*tokenizer.encode("a"), *token_ids]).removeprefix("a")


class WatchedModel:
    """A real model that notes each step's query lengths, and calls ``before`` ahead of it."""

    def __init__(
        self, model: Transformer, before: Callable[[int, RaggedBatch], None] | None = None
    ) -> None:
        """``before`` gets the step's number, from 1, and its batch; it may wait or raise."""
        self.model = model
        self.before = before
        self.steps: list[tuple[int, ...]] = []

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        self.steps.append(batch.query_lengths)
        if self.before is not None:
            self.before(len(self.steps), batch)
        return self.model.forward(batch, cache)


class Gate:
    """Holds an engine before its ``at``-th step until the test opens it."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, step: int, batch: RaggedBatch) -> None:
        if step == self.at:
            self._reached.set()
            assert self._open.wait(60)

    def wait_until_reached(self) -> None:
        assert self._reached.wait(60)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def watched(loaded: LoadedModel) -> Callable[..., WatchedModel]:
    return lambda before=None: WatchedModel(loaded.model, before)


@pytest.fixture(scope="session")
def gate() -> type[Gate]:
    return Gate


def load_exactly(path: Path, tokenizer: Tokenizer) -> LoadedModel:
    """In float32, with torch's operations."""
    checkpoint = open_checkpoint(path)
    config = resolve_config(checkpoint)
    device = torch.device("cpu")
    model = Transformer.load(
        checkpoint,
        config,
        dtype=torch.float32,
        device=device,
        linears=DenseLinears(device, torch.float32),
        ops=TorchOps(),
    )
    return LoadedModel(path, model, config, tokenizer)


@pytest.fixture(scope="session")
def loaded(demo_model: Path) -> LoadedModel:
    """The demo model."""
    return load_exactly(demo_model, load_tokenizer(open_checkpoint(demo_model)))


@pytest.fixture(scope="module", params=[InlineQueue, LazyQueue], ids=["in turn", "ahead"])
def make_queue(request: pytest.FixtureRequest) -> type[InlineQueue] | type[LazyQueue]:
    """Steps in turn as on the CPU, and each launched before the one before it is read."""
    kind: type[InlineQueue] | type[LazyQueue] = request.param
    return kind


@pytest.fixture
def make_engine(
    loaded: LoadedModel, make_queue: Callable[[], DeviceQueue]
) -> Iterator[Callable[..., Engine]]:
    """Engines that are closed, and whose blocks are all back, when the test ends."""
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engines.append(loaded.engine(**{"queue": make_queue(), **settings}))
        return engines[-1]

    yield make
    for engine in engines:
        if engine.healthy:
            engine.check_integrity()
        engine.close()
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel, make_queue: Callable[[], DeviceQueue]) -> Iterator[Engine]:
    """One engine for all tests of a module: jobs must leave no trace in each other."""
    with loaded.engine(queue=make_queue()) as engine:
        yield engine
        engine.check_integrity()
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total


class NoText:
    """For tests of what happens before there is text: takes tokens and says nothing."""

    released = ""
    thinking = False

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        return False

    def close(self) -> bool:
        return False

    def take(self) -> str:
        return ""


@pytest.fixture(scope="session")
def make_sequence() -> Callable[..., Sequence]:
    """A sequence of given ids; keyword arguments are fields of its request."""

    def make(
        prompt: int | list[int] = 4,
        generated: list[int] | None = None,
        *,
        arrival: int = 0,
        eos_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        **fields: Any,
    ) -> Sequence:
        prompt_ids = list(range(prompt)) if isinstance(prompt, int) else prompt
        sequence = Sequence(
            prompt_ids,
            GenerationRequest(prompt_token_ids=prompt_ids, **fields),
            seed=seed,
            text=NoText(),  # type: ignore[arg-type]
            arrival=arrival,
            eos_ids=eos_ids,
        )
        sequence.token_ids += generated or ()
        return sequence

    return make
