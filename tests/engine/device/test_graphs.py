"""Replayed decode steps give the tokens of computed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine, loading
from llorch_worker.engine.device.graphs import CudaRecorder, DecodeGraphs, bucket_sizes
from llorch_worker.engine.loading import LoadedModel, recorded_bytes
from llorch_worker.engine.memory import load_plan
from llorch_worker.engine.memory.load_plan import cache_shape, plan_load
from llorch_worker.engine_options import EngineOptions
from tests.engine.recording import Recorder
from tests.engine.together import all_at_once

ROWS = 6
PROMPTS = ["Once", "Once upon a time, there was a little", "The dog", "Lily and Tom", "A", "I am"]


@pytest.fixture
def recorded(loaded: Any, make_queue: Callable[[], Any]) -> Iterator[tuple[Engine, Recorder]]:
    shape = cache_shape(
        loaded.config, 64, dtype=torch.float32, device=torch.device("cpu"), decode_rows=ROWS
    )
    cache = UnifiedCache.allocate(shape, 40)
    recorder = Recorder()
    with Engine(
        LoadedModel(loaded.model, cache, DecodeGraphs(loaded.model, cache, recorder)),
        tokenizer=loaded.tokenizer,
        model_name="stories",
        options=EngineOptions(max_sequences=ROWS),
        queue=make_queue(),
    ) as engine:
        yield engine, recorder
        engine.check_integrity()
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total == 40


def requests(**fields: Any) -> list[GenerationRequest]:
    """Requests of unequal lengths, so that they leave the batch at different steps."""
    return [
        GenerationRequest(prompt=prompt, max_tokens=8 + 5 * i, **fields)
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}])
def test_replayed_steps_give_the_tokens_of_computed_steps(
    recorded: tuple[Engine, Recorder], make_engine: Callable[..., Engine], fields: dict[str, Any]
) -> None:
    engine, recorder = recorded
    with all_at_once(engine):
        generations = [engine.submit(request) for request in requests(**fields)]
    tokens = [generation.result(60).choices[0].token_ids for generation in generations]
    alone = make_engine(max_sequences=1)
    expected = [alone.submit(r).result(60).choices[0].token_ids for r in requests(**fields)]
    assert tokens == expected
    assert recorder.replayed > 20


def test_a_smaller_batch_leaves_nothing_of_a_larger_one(
    recorded: tuple[Engine, Recorder], make_engine: Callable[..., Engine]
) -> None:
    """Blocks of sequences that left belong to others: blank rows must not write to them."""
    engine, _ = recorded
    with all_at_once(engine):
        first = [engine.submit(request) for request in requests(temperature=0)]
    for generation in first:
        generation.result(60)
    request = GenerationRequest(prompt=PROMPTS[1], max_tokens=30, temperature=0)
    with all_at_once(engine):
        again = [engine.submit(request) for _ in range(3)]
    expected = make_engine().submit(request).result(60).choices[0].token_ids
    assert [g.result(60).choices[0].token_ids for g in again] == [expected] * 3


def test_prefills_and_other_caches_are_not_replayed(
    recorded: tuple[Engine, Recorder], loaded: Any
) -> None:
    engine, recorder = recorded
    ids = engine.tokenizer.encode(PROMPTS[1])
    with loaded.engine() as plain:
        assert torch.equal(engine.logits(ids), plain.logits(ids))
        assert torch.equal(engine.logits(ids[:1]), plain.logits(ids[:1]))
    assert recorder.replayed == 0


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (6, [1, 2, 4, 6]), (20, [1, 2, 4, 8, 16, 20])]
)
def test_recorded_sizes_end_at_max_sequences(most: int, sizes: list[int]) -> None:
    assert bucket_sizes(most) == sizes


def test_all_graphs_are_recorded_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for every stream."""
    cuda = FakeCuda()
    for name in ("device", "stream", "graph", "Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    recorder = CudaRecorder(torch.device("cuda", 1))
    for _ in range(3):
        recorder.record(lambda: None)
    assert len(cuda.streams) == 1
    assert cuda.used == ["the pool", cuda.streams[0]] * 3


class FakeStream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeCuda:
    """As much of ``torch.cuda`` as a recording touches."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.used: list[object] = []

    def Stream(self, device: torch.device) -> FakeStream:
        self.streams.append(FakeStream(device))
        return self.streams[-1]

    class CUDAGraph:
        def replay(self) -> None:
            pass

    def device(self, _device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self, stream: FakeStream) -> AbstractContextManager[None]:
        assert stream is self.streams[0]
        return nullcontext()

    def graph(
        self, _graph: CUDAGraph, pool: str, stream: FakeStream, capture_error_mode: str
    ) -> AbstractContextManager[None]:
        assert capture_error_mode == "thread_local"
        self.used += [pool, stream]
        return nullcontext()


class Card:
    """A recorder that keeps memory for all recordings at first, and for each of them."""

    def __init__(self) -> None:
        self.free_bytes = 10**9
        self.shared = False
        self.recorded = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.free_bytes -= 1_000 if self.shared else 70_000
        self.shared = True
        self.recorded += 1
        return run

    def begin_anew(self) -> None:
        self.free_bytes, self.shared = 10**9, False


@pytest.mark.parametrize(("rows", "taken"), [(1, 70_000), (ROWS, 73_000)])
def test_two_recordings_tell_what_all_sizes_take(loaded: Any, rows: int, taken: int) -> None:
    shape = cache_shape(
        loaded.config, 64, dtype=torch.float32, device=torch.device("cpu"), decode_rows=rows
    )
    card = Card()
    assert recorded_bytes(loaded.model, shape, card, lambda: card.free_bytes) == taken
    assert card.recorded == min(2, rows)
    assert card.free_bytes == 10**9, "the recordings that count share nothing with these"


def test_kv_blocks_get_the_memory_that_recorded_steps_left(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As loading finds it out on a card, whatever was planned."""
    monkeypatch.setattr(load_plan, "records_decode", lambda *_: True)
    options = EngineOptions(
        device="cpu", dtype="float32", max_sequences=ROWS, max_context=64, kernels="torch"
    )
    plan = plan_load(loaded.path, options)
    assert plan.num_blocks == ROWS * 4
    card = Card()
    monkeypatch.setattr(loading, "CudaRecorder", lambda _: card)
    monkeypatch.setattr(loading, "free_bytes", lambda _: card.free_bytes)
    planned = plan.with_recorded(0)
    card.free_bytes = needed = next(
        free
        for free in range(0, 10**9, 10_000)
        if planned.fitted_to(free).num_blocks == ROWS * 4 and not planned.fitted_to(free).misfit
    )
    monkeypatch.setattr(card, "begin_anew", lambda: setattr(card, "free_bytes", needed))
    fewer = planned.with_recorded(73_000).fitted_to(needed)
    assert 0 < fewer.num_blocks < ROWS * 4
    assert loading.load_as_planned(planned).cache.blocks.total == fewer.num_blocks
