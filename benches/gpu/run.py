"""All measurements in turn; a failed one is reported and the others go on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benches.gpu.figures import Case, DecodeFigures, NotMeasured, Rates, RatioFigures
from benches.gpu.measures import Bench
from benches.gpu.peer import measure_peer
from benches.gpu.random_model import random_llama
from benches.gpu.random_weights import DENSE
from benches.gpu.report import Report, one_line
from llorch_worker.bench.instruments.model_costs import kv_token_bytes
from llorch_worker.cache import BLOCK_SIZE_TOKENS
from llorch_worker.engine.device.graphs import Recorder
from llorch_worker.engine.memory.cache_shape import cache_shape
from llorch_worker.engine.memory.free_memory import free_bytes
from llorch_worker.engine.memory.load_plan import CACHE_SHARE
from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import choose_ops
from llorch_worker.model import ModelConfig

PEER_BATCH = 64


@dataclass(frozen=True)
class Plan:
    """What to measure; sizes are in tokens."""

    config: ModelConfig
    weights: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    kv_dtype: KvDtype
    peer: bool


class Run:
    """One plan on one device."""

    def __init__(
        self,
        plan: Plan,
        report: Report,
        rates: Rates,
        *,
        device: torch.device,
        recorder: Callable[[torch.device], Recorder],
    ) -> None:
        """``recorder`` makes the recorder of decode steps."""
        self._plan = plan
        self._report = report
        self._rates = rates
        self._device = device
        self._recorder = recorder
        self._dense: dict[tuple[Case, bool], DecodeFigures] = {}

    def measure(self) -> None:
        """Measures dense weights first, because the others are compared with them."""
        for weights in sorted(self._plan.weights, key=lambda name: name != DENSE):
            with self._report.attempt(f"all of {weights} weights"), torch.inference_mode():
                self._measure_model(weights)
            self._free_memory()
        if self._plan.peer:
            self._measure_peer()
            self._free_memory()

    def _measure_model(self, weights: str) -> None:
        plan, report = self._plan, self._report
        dtype, kv_dtype = torch.bfloat16, plan.kv_dtype
        chosen = choose_ops(self._device, dtype, head_dim=plan.config.head_dim, kv_dtype=kv_dtype)
        ops = chosen.ops
        model = random_llama(plan.config, ops, weights=weights, dtype=dtype, device=self._device)
        report.note(
            "model",
            {
                "weights": weights,
                "weight_bytes": model.weight_bytes,
                "layers": plan.config.num_layers,
                "kernels": ops.name,
                "kv_dtype": plan.kv_dtype,
            },
            f"model of {plan.config.num_layers} layers, {weights}: "
            f"{model.weight_bytes / 2**30:.1f} GiB, kernels {ops.name}, KV {plan.kv_dtype}",
        )
        fitting = self._fitting()
        bench = Bench(
            model,
            self._rates,
            weights=weights,
            cases=[*fitting, *(Case(1, tokens) for tokens in plan.prefills)],
            longest=max(*plan.contexts, *plan.prefills),
            kv_dtype=kv_dtype,
            device=self._device,
            recorder=self._recorder(self._device),
        )
        for case in fitting:
            for graphs in (True, False):
                name = f"decode {weights} {case.batch} x {case.context}"
                with report.attempt(f"{name} {'with graphs' if graphs else 'eager'}"):
                    self._add_decode(case, bench.decode(case, graphs=graphs))
        for tokens in plan.prefills:
            with report.attempt(f"prefill {weights} {tokens}"):
                report.add(bench.prefill(tokens))

    def _add_decode(self, case: Case, figures: DecodeFigures) -> None:
        self._report.add(figures)
        if figures.weights == DENSE:
            self._dense[case, figures.graphs] = figures
        elif dense := self._dense.get((case, figures.graphs)):
            self._add_ratio(figures, DENSE, dense.tokens_per_s)

    def _add_ratio(self, figures: DecodeFigures, over: str, tokens_per_s: float) -> None:
        self._report.add(
            RatioFigures(
                figures.weights,
                figures.batch,
                figures.context_tokens,
                figures.graphs,
                over,
                figures.tokens_per_s / tokens_per_s,
            )
        )

    def _fitting(self) -> list[Case]:
        """The cases whose KV cache fits into memory; reports the others."""
        shape = cache_shape(
            self._plan.config,
            1,
            dtype=torch.bfloat16,
            device=self._device,
            kv_dtype=self._plan.kv_dtype,
        )
        block_bytes = BLOCK_SIZE_TOKENS * kv_token_bytes(shape)
        room = int(free_bytes(self._device) * CACHE_SHARE[self._device.type]) // block_bytes
        fitting = []
        for batch in self._plan.batches:
            for context in self._plan.contexts:
                case = Case(batch, context)
                blocks = case.blocks(BLOCK_SIZE_TOKENS)
                if blocks <= room:
                    fitting.append(case)
                    continue
                self._report.add(
                    NotMeasured(
                        f"decode {batch} x {context}",
                        f"its KV cache takes {blocks * block_bytes / 2**30:.1f} GiB, but only "
                        f"{room * block_bytes / 2**30:.1f} GiB are free",
                    )
                )
        return fitting

    def _measure_peer(self) -> None:
        batch, context = PEER_BATCH, min(self._plan.contexts)
        try:
            figures = measure_peer(
                self._plan.config,
                batch=batch,
                context=context,
                dtype=torch.bfloat16,
                device=self._device,
            )
        except Exception as error:  # noqa: BLE001 - a peer that does not run is not our failure
            self._report.add(NotMeasured("transformers continuous batching", one_line(error)))
        else:
            self._report.add(figures)
            if dense := self._dense.get((Case(batch, context), True)):
                self._add_ratio(dense, figures.kind, figures.tokens_per_s)

    def _free_memory(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
