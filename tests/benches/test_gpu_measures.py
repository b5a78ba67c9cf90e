"""The GPU benchmark runs the engine's own steps at the requested contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benches.gpu.device_trace import idle_share
from benches.gpu.figures import STEPS, Case
from benches.gpu.measures import Bench, matrix_bytes
from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import InternalError
from llorch_worker.model import RaggedBatch
from tests.benches.tiny_llama import CPU, RATES, tiny_llama
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


def test_idle_is_what_no_kernel_covers() -> None:
    assert idle_share([]) is None
    assert idle_share([(0, 4), (6, 10)]) == pytest.approx(0.2)
    assert idle_share([(6, 10), (0, 8), (1, 2)]) == 0  # side by side, and out of order
