"""Steps of the runner and the sampler on the device, timed from the host that waits for tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benches.gpu.roofline import prefill_work, step_work
from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.block_plan import cache_shape
from llorch_worker.engine.decode_graphs import CudaRecorder, DecodeGraphs
from llorch_worker.engine.runner import ForwardModel, Runner
from llorch_worker.engine.sampler import Sampler
from llorch_worker.engine.scheduler import Chunk
from llorch_worker.engine.sequence import Sequence as Running
from llorch_worker.kernels import KvForm
from llorch_worker.model import Llama

WARM_UP_STEPS = 4
STEPS = 24
MORE_TOKENS = WARM_UP_STEPS + 2 * STEPS
"""That a sequence gets while it is measured."""


@dataclass(frozen=True)
class Case:
    """``batch`` sequences that hold ``context`` tokens each."""

    batch: int
    context: int

    def blocks(self, block_size: int) -> int:
        """KV blocks that it takes, its new tokens included."""
        return self.batch * -(-(self.context + MORE_TOKENS) // block_size)


@dataclass(frozen=True)
class Rates:
    """The device's own, measured in the same run."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class DecodeFigures:
    batch: int
    context_tokens: int
    graphs: bool
    step_ms: float
    """Median, from one step's tokens on the host to the next's."""
    tokens_per_s: float
    copy_bandwidth_share: float
    """Bytes of weights and KV that a step must read, over its time, against the device's rate."""
    roofline_share: float
    idle_share: float
    """Of a step's time, what no kernel fills; kernels' times are torch.profiler's."""


@dataclass(frozen=True)
class PrefillFigures:
    tokens: int
    step_ms: float
    tokens_per_s: float
    matrix_rate_share: float


class _NoText:
    """Takes the place of a choice's text: what it costs is the engine's, not the device's."""

    released = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:  # noqa: ARG002
        return False

    def close(self) -> bool:
        return False

    def take(self) -> str:
        return ""


class Bench:
    """One model, and one cache large enough for what is asked."""

    def __init__(
        self,
        model: Llama,
        rates: Rates,
        *,
        cases: Sequence[Case],
        longest: int,
        kv_form: KvForm,
        device: torch.device,
    ) -> None:
        """``longest``: tokens of the longest sequence of any case."""
        self._model = model
        self._rates = rates
        self._device = device
        self._item = model.embedding.dtype.itemsize
        most = max(case.batch for case in cases)
        longest += MORE_TOKENS
        shape = cache_shape(
            model.config,
            longest,
            dtype=model.embedding.dtype,
            device=device,
            kv_form=kv_form,
            decode_rows=most,
        )
        self._block_size = shape["block_size"]
        blocks = max(case.blocks(self._block_size) for case in cases)
        self._cache = UnifiedCache.allocate(num_blocks=blocks, **shape)
        self._graphs = DecodeGraphs(model, self._cache, CudaRecorder(device))

    def decode(self, case: Case, *, graphs: bool) -> DecodeFigures:
        """Greedy steps."""
        batch, context = case.batch, case.context
        runner, sequences = self._running(batch, context, self._graphs if graphs else self._model)
        for _ in range(WARM_UP_STEPS):
            self._step(runner, sequences)
        times = []
        for _ in range(STEPS):
            began = time.perf_counter()
            self._step(runner, sequences)  # ends with the tokens on the host
            times.append(time.perf_counter() - began)
        step_s = statistics.median(times)
        busy_s = self._kernel_seconds(runner, sequences)
        held = sum(len(sequence.token_ids) for sequence in sequences)
        work = step_work(
            self._model.config,
            tokens=batch,
            contexts=held,
            logits_rows=batch,
            item_bytes=self._item,
            kv_item_bytes=self._cache.kv.keys.dtype.itemsize,
        )
        rates = self._rates
        return DecodeFigures(
            batch=batch,
            context_tokens=context,
            graphs=graphs,
            step_ms=1e3 * step_s,
            tokens_per_s=batch / step_s,
            copy_bandwidth_share=work.read_bytes / step_s / rates.bytes_per_s,
            roofline_share=work.best_s(rates.bytes_per_s, rates.flops_per_s) / step_s,
            idle_share=max(0.0, 1 - busy_s / step_s),
        )

    def prefill(self, tokens: int) -> PrefillFigures:
        """One prompt in one step."""
        times = []
        for repetition in range(5):
            runner, sequences = self._running(1, tokens, self._model)
            sequences[0].computed = 0
            torch.cuda.synchronize(self._device)
            began = time.perf_counter()
            runner.run([Chunk(sequences[0], 0, tokens)])
            if repetition:
                times.append(time.perf_counter() - began)
        step_s = statistics.median(times)
        work = prefill_work(self._model.config, tokens=tokens, item_bytes=self._item)
        return PrefillFigures(
            tokens=tokens,
            step_ms=1e3 * step_s,
            tokens_per_s=tokens / step_s,
            matrix_rate_share=work.flops / step_s / self._rates.flops_per_s,
        )

    def _running(
        self, batch: int, context: int, model: ForwardModel
    ) -> tuple[Runner, list[Running]]:
        sampler = Sampler(self._model.config.vocab_size, self._device)
        each = Case(1, context).blocks(self._block_size)
        sequences = []
        for row in range(batch):
            ids = [(7 * row + place) % self._model.config.vocab_size for place in range(context)]
            request = GenerationRequest(prompt_token_ids=ids, max_tokens=1, temperature=0)
            text: Any = _NoText()
            sequence = Running(ids, request, seed=0, text=text, arrival=row)
            sequence.blocks = list(range(row * each, (row + 1) * each))
            sequence.computed = context - 1
            sequences.append(sequence)
        return Runner(model, self._cache, sampler, self._device), sequences

    @staticmethod
    def _step(runner: Runner, sequences: list[Running]) -> None:
        output = runner.run([Chunk(each, each.computed, 1) for each in sequences])
        for sequence, token_id in zip(sequences, output.sampled.token_ids, strict=True):
            sequence.token_ids.append(token_id)
            sequence.computed += 1

    def _kernel_seconds(self, runner: Runner, sequences: list[Running]) -> float:
        """Of one step, on average."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(STEPS):
                self._step(runner, sequences)
            torch.cuda.synchronize(self._device)
        total_us: float = sum(event.self_device_time_total for event in profile.key_averages())
        return total_us / 1e6 / STEPS
