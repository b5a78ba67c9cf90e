"""Steps of the engine's core on the device, timed on the host that waits for tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from benches.gpu.device import device_spans, idle_share
from benches.gpu.figures import (
    LEAD_TOKENS,
    NEW_TOKENS,
    STEPS,
    WARM_UP_STEPS,
    Case,
    DecodeFigures,
    PrefillFigures,
    Rates,
)
from benches.gpu.random_model import draw_keys_and_values
from llorch_worker.bench.instruments.model_costs import (
    decode_flops,
    kv_token_bytes,
    prefill_flops,
)
from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine.core import EngineCore
from llorch_worker.engine.device.graphs import DecodeGraphs, Recorder
from llorch_worker.engine.generation import Generation
from llorch_worker.engine.interface import ModelFacts
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.engine.runner import Runner
from llorch_worker.engine.sampling.sampler import Sampler
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence import Sequence as Running
from llorch_worker.engine.stats import Counters
from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import select_sample
from llorch_worker.model import ForwardModel, RaggedBatch, Transformer
from llorch_worker.processes.board import Board

PREFILLS = 5
"""The first one does not count."""


class Bench:
    """One model and a sufficiently large cache, run by the engine's core.

    Steps are planned, launched ahead, sampled and delivered as in a worker. Only the tokens' text
    and the queue are missing.
    """

    def __init__(
        self,
        model: Transformer,
        rates: Rates,
        *,
        weights: str,
        cases: Sequence[Case],
        longest: int,
        kv_dtype: KvDtype,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        """``weights``: the name of their type; ``longest``: tokens of the longest sequence in any
        case."""
        self._model = model
        self._rates = rates
        self._weights = weights
        self._device = device
        config, dtype = model.config, model.embedding.dtype
        most = max(case.batch for case in cases)
        shape = cache_shape(
            config,
            longest + NEW_TOKENS,
            dtype=dtype,
            device=device,
            kv_dtype=kv_dtype,
            decode_rows=most,
        )
        blocks = max(case.blocks(shape.block_size) for case in cases)
        cache = UnifiedCache.allocate(shape, blocks)
        draw_keys_and_values(cache.kv)
        self._kv_token_bytes = kv_token_bytes(shape)
        self._graphs = DecodeGraphs(model, cache, recorder)
        self._steps = _Switch(model)
        self._scheduler = Scheduler(
            cache.blocks,
            cache.windows,
            block_size=cache.block_size,
            max_sequences=most,
            # Every case must begin in one step.
            max_step_tokens=max(case.batch * case.context for case in cases),
            # A repeated prompt must be computed again.
            prefix_caching=False,
        )
        sampler = Sampler(config.vocab_size, device, select_sample(device))
        runner = Runner(self._steps, cache, sampler, device)
        self._core = EngineCore(
            self._scheduler,
            runner,
            Counters(),
            lambda token_id: (str(token_id), None),
            board=Board(most),
        )

    def decode(self, case: Case, *, graphs: bool) -> DecodeFigures:
        """Times greedy steps; each sequence has ``case.context`` tokens at the middle step."""
        with self._decoding(case) as sequences:
            self._steps.model = self._graphs if graphs else self._model
            for _ in range(WARM_UP_STEPS):
                self._core.step()
            before = _held(sequences)
            step_s = statistics.median(self._step_s() for _ in range(STEPS))
            # The first of these steps read ``before`` tokens, the last all except its new ones.
            contexts = (before + _held(sequences) - case.batch) // 2
            self._wait()
            idle = idle_share(device_spans(self._run_steps, self._device))
        rates = self._rates
        # Its least, if reading and computing overlap, each at the device's own rate.
        read_s = (
            self._model.matrix_bytes + self._kv_token_bytes * contexts
        ) / rates.copy_bytes_per_s
        flops = decode_flops(self._model.config, case.batch, contexts)
        return DecodeFigures(
            weights=self._weights,
            batch=case.batch,
            context_tokens=contexts // case.batch,
            graphs=graphs,
            step_ms=1e3 * step_s,
            tokens_per_s=case.batch / step_s,
            copy_bandwidth_share=read_s / step_s,
            roofline_share=max(read_s, flops / rates.matrix_flops_per_s) / step_s,
            idle_share=idle,
        )

    def prefill(self, tokens: int) -> PrefillFigures:
        """Times one prompt in one step, from its plan to its first token on the host."""
        self._steps.model = self._model
        times = []
        for _ in range(PREFILLS):
            generation = self._add(0, tokens, new_tokens=1)
            self._wait()
            times.append(self._step_s())
            generation.result(timeout=0)  # raises the step's error
        step_s = statistics.median(times[1:])
        flops = prefill_flops(self._model.config, tokens=tokens)
        return PrefillFigures(
            weights=self._weights,
            tokens=tokens,
            step_ms=1e3 * step_s,
            tokens_per_s=tokens / step_s,
            matrix_rate_share=flops / step_s / self._rates.matrix_flops_per_s,
        )

    @contextmanager
    def _decoding(self, case: Case) -> Iterator[list[Running]]:
        """The sequences of a case, which decode from the next step on. Raises if one ended."""
        prompt = case.context - LEAD_TOKENS
        if prompt < 1:
            raise ValueError(f"a context of {case.context} tokens; more than {LEAD_TOKENS} go")
        preempted = self._scheduler.preempted_total
        generations = [self._add(row, prompt, new_tokens=NEW_TOKENS) for row in range(case.batch)]
        try:
            # The cache is full of random keys and values, so prompts need not be computed.
            self._steps.model = _NoLogits(self._model.config.vocab_size)
            self._core.step()
            sequences = [each.sequences[0] for each in generations]
            if any(sequence.pending != 1 for sequence in sequences):
                raise RuntimeError("the case did not begin in one step")
            yield sequences
            for generation in generations:
                if generation.done:
                    generation.result(timeout=0)
                    raise RuntimeError("a sequence ended while it was measured")
            if self._scheduler.preempted_total != preempted:
                raise RuntimeError("the device had no memory for a step of the whole batch")
        finally:
            self._core.cancel_all("measured")

    def _add(self, row: int, tokens: int, *, new_tokens: int) -> Generation:
        """Submits a greedy generation with a prompt of its own."""
        vocab_size = self._model.config.vocab_size
        ids = [(7 * row + place) % vocab_size for place in range(tokens)]
        request = GenerationRequest(
            prompt_token_ids=ids, max_tokens=new_tokens, ignore_eos=True, temperature=0
        )
        # It knows no token, so it costs next to nothing.
        table = SimpleNamespace(errors="strict", drops_first_space=False)
        tokenizer: Any = SimpleNamespace(vocab_size=0, decoding_table=table)
        text = ChoiceText(tokenizer)
        generation = Generation(
            request,
            ModelFacts("random"),
            (Running(ids, request, seed=0, text=text, arrival=row),),
            request_cancel=self._core.cancel,
        )
        self._core.add(generation)
        return generation

    def _step_s(self) -> float:
        """Seconds of one engine step. Afterwards its tokens are delivered and, if the engine
        launches ahead, the next step is on the device."""
        began = time.perf_counter()
        self._core.step()
        return time.perf_counter() - began

    def _run_steps(self) -> None:
        for _ in range(STEPS):
            self._core.step()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Switch:
    """The runner's model, which can be exchanged."""

    def __init__(self, model: ForwardModel) -> None:
        self.model = model

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        return self.model.forward(batch, cache)


class _NoLogits:
    """A model that prefills in no time, because it writes nothing to the cache."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:  # noqa: ARG002
        return torch.zeros(
            len(batch.logits_rows), self._vocab_size, device=batch.logits_rows.device
        )


def _held(sequences: list[Running]) -> int:
    return sum(len(sequence.token_ids) for sequence in sequences)
