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
from llorch_worker.engine.loading import LoadedModel, measured_recorded_bytes
from llorch_worker.engine.memory import load_plan
from llorch_worker.engine.memory.load_plan import cache_shape, plan_load
from llorch_worker.engine_options import EngineOptions
from llorch_worker.model import RaggedBatch
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


def test_mixed_steps_replay_all_but_their_attention(loaded: Any, make_engine: Any) -> None:
    """Prompts come and grow beside decodes, in steps of up to 70 tokens, and steps of more."""
    cpu = torch.device("cpu")
    shape = cache_shape(
        loaded.config, 256, dtype=torch.float32, device=cpu, decode_rows=ROWS, max_step_tokens=70
    )
    cache = UnifiedCache.allocate(shape, 80)
    recorder = Recorder()
    steps = Mixed(loading.recorded(loaded.model, cache, recorder), recorder)
    options = EngineOptions(max_sequences=ROWS, max_step_tokens=200)
    prompts = [[5 + i, *range(9, 9 + 30 * i)] for i in range(6)]
    wanted = [
        GenerationRequest(prompt_token_ids=ids, max_tokens=6 + 3 * i, temperature=0, **more)
        for i, (ids, more) in enumerate(zip(prompts, [{}, {"prompt_logprobs": 1}] * 3, strict=True))
    ]
    with Engine(
        LoadedModel(loaded.model, cache, steps),
        tokenizer=loaded.tokenizer,
        model_name="stories",
        options=options,
    ) as engine:
        results = []
        for first in (0, 3):
            with all_at_once(engine):
                generations = [engine.submit(each) for each in wanted[first : first + 3]]
            results += [generation.result(60) for generation in generations]
    alone = make_engine(max_sequences=1)
    for request, result in zip(wanted, results, strict=True):
        expected = alone.submit(request).result(60)
        assert result.choices[0].token_ids == expected.choices[0].token_ids
        assert (result.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    # A graph before each attention, and one after the last.
    assert steps.replays[True] == {loaded.config.num_layers + 1}
    assert steps.replays[False] == {0}, "steps of more tokens than were recorded"


class Mixed:
    """Notes how many recordings each mixed step replays, by whether it has at most 128 tokens."""

    def __init__(self, model: Any, recorder: Recorder) -> None:
        self.model = model
        self.recorder = recorder
        self.replays: dict[bool, set[int]] = {True: set(), False: set()}

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        before = self.recorder.replayed
        logits: torch.Tensor = self.model.forward(batch, cache)
        if max(batch.query_lengths) > 1:
            small = len(batch.token_ids) <= 128
            self.replays[small].add(self.recorder.replayed - before)
        return logits


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
    for name in ("device", "stream", "graph", "Stream", "CUDAGraph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    recorder = CudaRecorder(torch.device("cuda", 1))
    for _ in range(3):
        recorder.record(lambda: None)
    assert len(cuda.streams) == 1
    assert cuda.used == ["the pool", cuda.streams[0]] * 3
    runs: list[int] = []

    def run(cut: Callable[[], None]) -> None:
        runs.append(len(cuda.used))
        cut()
        cut()

    cuda.used.clear()
    assert len(recorder.record_pieces(run)) == 3
    # Once before, so that nothing is compiled while the card records.
    assert runs == [0, 1]
    assert cuda.used == ["the pool", "an end"] * 3


class FakeStream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeGraph:
    def __init__(self, used: list[object]) -> None:
        self.used = used

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.used.append(pool)

    def capture_end(self) -> None:
        self.used.append("an end")

    def replay(self) -> None:
        pass


class FakeCuda:
    """As much of ``torch.cuda`` as a recording touches."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.used: list[object] = []

    def Stream(self, device: torch.device) -> FakeStream:
        self.streams.append(FakeStream(device))
        return self.streams[-1]

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self.used)

    def synchronize(self) -> None:
        assert not self.used, "nothing waits for the card while it records"

    def device(self, _device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self, stream: FakeStream) -> AbstractContextManager[None]:
        assert stream is self.streams[0]
        return nullcontext()

    def graph(
        self, _graph: FakeGraph, pool: str, stream: FakeStream, capture_error_mode: str
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

    def record_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        cuts: list[None] = []
        run(lambda: cuts.append(None))
        self.record(lambda: None)
        return [lambda: None] * (len(cuts) + 1)

    def begin_anew(self) -> None:
        self.free_bytes, self.shared = 10**9, False


@pytest.mark.parametrize(("rows", "tokens", "taken"), [(1, 9, 71_000), (ROWS, 512, 81_000)])
def test_two_recordings_of_a_kind_tell_what_all_sizes_take(
    loaded: Any, rows: int, tokens: int, taken: int
) -> None:
    """Decodes of 1, 2, 4 and 6 sequences, and mixed steps of up to 64, 128 .. 512 tokens."""
    cpu = torch.device("cpu")
    shape = cache_shape(
        loaded.config, 64, dtype=torch.float32, device=cpu, decode_rows=rows, max_step_tokens=tokens
    )
    card = Card()
    assert measured_recorded_bytes(loaded.model, shape, card, lambda: card.free_bytes) == taken
    assert card.recorded == (2 if rows == 1 else 4)
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
    monkeypatch.setattr(loading, "free_bytes", lambda *_: card.free_bytes)
    planned = plan.with_recorded(0)
    card.free_bytes = needed = next(
        free
        for free in range(0, 10**9, 10_000)
        if planned.fitted_to(free).num_blocks == ROWS * 4 and not planned.fitted_to(free).misfit
    )
    monkeypatch.setattr(card, "begin_anew", lambda: setattr(card, "free_bytes", needed))
    # As above.
    fewer = planned.with_recorded(81_000).fitted_to(needed)
    assert 0 < fewer.num_blocks < ROWS * 4
    assert loading.load_as_planned(planned).cache.blocks.total == fewer.num_blocks
