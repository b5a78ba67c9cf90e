"""The GPU benchmark runs the engine's own steps at the requested contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benches.gpu import device_trace
from benches.gpu.device_trace import idle_share
from benches.gpu.figures import STEPS, Case
from benches.gpu.measures import Bench
from benches.gpu.roofline import matrix_bytes
from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import InternalError
from llorch_worker.model import RaggedBatch
from tests.benches.tiny_llama import CPU, RATES, tiny_llama
from tests.engine.lazy_queue import LazyQueue
from tests.engine.recording import Recorder


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def ignore(batch: RaggedBatch) -> None: ...


class Watched:
    """A tiny model that calls ``before_step`` with each batch."""

    def __init__(self, before_step: Callable[[RaggedBatch], None] = ignore) -> None:
        self.model = tiny_llama()
        self.before_step = before_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        self.before_step(batch)
        return self.model.forward(batch, cache)


def tiny_bench(*cases: Case, model: Any = None, queue: Any = None, recorder: Any = None) -> Bench:
    return Bench(
        model or tiny_llama(),
        RATES,
        weights="bf16",
        cases=cases,
        longest=max(case.context for case in cases),
        kv_dtype="auto",
        device=CPU,
        recorder=recorder or Recorder(),
        queue=queue,
    )


def test_steps_are_launched_two_deep_as_the_engine_does() -> None:
    queue = LazyQueue()
    case = Case(3, 40)
    tiny_bench(case, queue=queue).decode(case, graphs=False)
    assert (queue.most_unread, queue.unread) == (2, 0)


def test_the_middle_timed_step_has_the_requested_context() -> None:
    lengths: list[tuple[int, ...]] = []
    model = Watched(lambda batch: lengths.append(batch.context_lengths))
    figures = tiny_bench(Case(2, 40), model=model).decode(Case(2, 40), graphs=False)
    decodes = lengths[-4 - STEPS :]  # no profiler runs on a CPU
    assert len(decodes) == 4 + STEPS
    assert decodes[4 + STEPS // 2] == (40, 40)
    assert figures.context_tokens == 40
    work = matrix_bytes(model.model) + 2 * 40 * 2 * 2 * 2 * 8 * 4
    share = work / (figures.step_ms / 1e3) / RATES.copy_bytes_per_s
    assert figures.copy_bandwidth_share == pytest.approx(share)
    assert figures.idle_share is None


def test_graphs_are_replayed_only_on_request() -> None:
    recorder = Recorder()
    case = Case(3, 40)
    bench = tiny_bench(case, Case(1, 20), recorder=recorder)
    assert bench.decode(case, graphs=False).tokens_per_s > 0
    assert recorder.replayed == 0
    assert bench.decode(case, graphs=True).tokens_per_s > 0
    assert recorder.replayed == 4 + STEPS
    assert bench.decode(Case(1, 20), graphs=True).context_tokens == 20
    assert bench.prefill(20).tokens_per_s > 0


def test_a_step_that_fails_fails_its_measure_and_not_the_next() -> None:
    def fail(batch: RaggedBatch) -> None:
        raise RuntimeError("a kernel does not compile")

    model = Watched()
    case = Case(2, 40)
    bench = tiny_bench(case, model=model)
    model.before_step = fail
    with pytest.raises(InternalError, match="the engine step failed"):
        bench.decode(case, graphs=False)
    with pytest.raises(InternalError, match="the engine step failed"):
        bench.prefill(20)
    model.before_step = ignore
    assert bench.decode(case, graphs=False).batch == 2


def test_a_batch_that_memory_holds_only_in_part_is_not_measured() -> None:
    def only_one(batch: RaggedBatch) -> None:
        if len(batch.query_lengths) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = Watched()
    case = Case(2, 40)
    bench = tiny_bench(case, model=model)
    model.before_step = only_one
    with pytest.raises(RuntimeError, match="no memory for a step"):
        bench.decode(case, graphs=False)


def test_a_context_shorter_than_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="a context of 10 tokens"):
        tiny_bench(Case(1, 20)).decode(Case(1, 10), graphs=False)


def test_a_card_works_in_the_kernels_and_copies_that_the_profiler_saw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def event(place: str, begin: float, end: float, annotated: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            device_type=SimpleNamespace(name=place),
            time_range=SimpleNamespace(start=begin, end=end),
            is_user_annotation=annotated,
        )

    calls = Mock()
    calls.profile.return_value = calls
    events = [event("CPU", 0, 9), event("CUDA", 1, 2), event("CUDA", 0, 8, True)]
    calls.events.return_value = events
    monkeypatch.setattr(device_trace, "profile", calls.profile)
    monkeypatch.setattr(torch.cuda, "synchronize", calls.wait)
    card = torch.device("cuda:0")
    assert device_trace.device_spans(calls.work, card) == [(1, 2)]
    order = [name for name, _, _ in calls.mock_calls]
    assert order == ["profile", "start", "work", "wait", "stop", "events"]
    calls.profile.side_effect = AssertionError("No activities specified for the profiler")
    assert device_trace.device_spans(calls.work, card) == [], "nothing is known without a profiler"


def test_idle_is_what_no_kernel_covers() -> None:
    assert idle_share([]) is None
    assert idle_share([(0, 4), (6, 10)]) == pytest.approx(0.2)
    assert idle_share([(6, 10), (0, 8), (1, 2)]) == 0  # side by side, and out of order
