"""All measurements in turn; a failed one is reported and the others go on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benches.gpu.figures import Case, DecodeFigures, Rates
from benches.gpu.measures import Bench
from benches.gpu.peer import measure_peer
from benches.gpu.random_model import random_llama
from benches.gpu.random_weights import DENSE
from benches.gpu.report import Report, one_line
from llorch_worker.bench.instruments.model_costs import kv_token_bytes
from llorch_worker.cache import BLOCK_SIZE_TOKENS
from llorch_worker.engine.device.graphs import Recorder
from llorch_worker.engine.memory.compute_device import free_bytes
from llorch_worker.engine.memory.load_plan import CACHE_SHARE, cache_shape
from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import choose_ops
from llorch_worker.model import ModelConfig

PEER_BATCH = 64


@dataclass(frozen=True)
class Wanted:
    """What to measure; sizes are in tokens."""

    config: ModelConfig
    weights: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    kv_dtype: KvDtype
    peer: bool


class Run:
    """All that is wanted, on one device."""

    def __init__(
        self,
        wanted: Wanted,
        report: Report,
        rates: Rates,
        *,
        device: torch.device,
        recorder: Callable[[torch.device], Recorder],
    ) -> None:
        """``recorder`` makes the recorder of decode steps."""
        self._wanted = wanted
        self._report = report
        self._rates = rates
        self._device = device
        self._recorder = recorder
        self._dense: dict[tuple[Case, bool], float] = {}
        """Tokens/s of dense weights, by case and whether graphs were used."""

    def measure(self) -> None:
        """Measures dense weights first, because the others are compared with them."""
        for weights in sorted(self._wanted.weights, key=lambda name: name != DENSE):
            with self._report.attempt(f"all of {weights} weights"), torch.inference_mode():
                self._measure_model(weights)
            self._free_memory()
        if self._wanted.peer:
            self._measure_peer()
            self._free_memory()

    def _measure_model(self, weights: str) -> None:
        wanted, report = self._wanted, self._report
        dtype, kv_dtype = torch.bfloat16, wanted.kv_dtype
        chosen = choose_ops(self._device, dtype, head_dim=wanted.config.head_dim, kv_dtype=kv_dtype)
        ops = chosen.ops
        model = random_llama(wanted.config, ops, weights=weights, dtype=dtype, device=self._device)
        report.note(
            "model",
            f"model of {wanted.config.num_layers} layers, {weights}: "
            f"{model.weight_bytes / 2**30:.1f} GiB, kernels {ops.name}, KV {kv_dtype}",
            {"weights": weights, "weight_bytes": model.weight_bytes, "kernels": ops.name,
             "layers": wanted.config.num_layers, "kv_dtype": kv_dtype},
        )  # fmt: skip
        fitting = self._fitting()
        bench = Bench(
            model,
            self._rates,
            weights=weights,
            cases=[*fitting, *(Case(1, tokens) for tokens in wanted.prefills)],
            longest=max(*wanted.contexts, *wanted.prefills),
            kv_dtype=kv_dtype,
            device=self._device,
            recorder=self._recorder(self._device),
        )
        for case in fitting:
            for graphs in (True, False):
                name = f"decode {weights} {case.batch} x {case.context}"
                with report.attempt(f"{name} {'with graphs' if graphs else 'eager'}"):
                    self._add_decode(case, bench.decode(case, graphs=graphs))
        for tokens in wanted.prefills:
            with report.attempt(f"prefill {weights} {tokens}"):
                report.add(bench.prefill(tokens))

    def _add_decode(self, case: Case, figures: DecodeFigures) -> None:
        place = case, figures.graphs
        if figures.weights == DENSE:
            self._dense[place] = figures.tokens_per_s
        elif dense := self._dense.get(place):
            figures = replace(figures, times_bf16=figures.tokens_per_s / dense)
        self._report.add(figures)

    def _fitting(self) -> list[Case]:
        """The cases whose KV cache fits into memory; reports the others."""
        shape = cache_shape(
            self._wanted.config,
            1,
            dtype=torch.bfloat16,
            device=self._device,
            kv_dtype=self._wanted.kv_dtype,
        )
        block_bytes = BLOCK_SIZE_TOKENS * kv_token_bytes(shape)
        room = int(free_bytes(self._device) * CACHE_SHARE[self._device.type]) // block_bytes
        fitting = []
        for batch in self._wanted.batches:
            for context in self._wanted.contexts:
                case = Case(batch, context)
                blocks = case.blocks(BLOCK_SIZE_TOKENS)
                if blocks <= room:
                    fitting.append(case)
                    continue
                self._report.leave_out(
                    f"decode {batch} x {context}",
                    f"its KV cache takes {blocks * block_bytes / 2**30:.1f} GiB, but only "
                    f"{room * block_bytes / 2**30:.1f} GiB are free",
                )
        return fitting

    def _measure_peer(self) -> None:
        batch, context = PEER_BATCH, min(self._wanted.contexts)
        name = "transformers continuous batching"
        try:
            tokens_per_s = measure_peer(
                self._wanted.config,
                batch=batch,
                context=context,
                dtype=torch.bfloat16,
                device=self._device,
            )
        except Exception as error:  # noqa: BLE001 - a peer that does not run is not our failure
            self._report.leave_out(name, one_line(error))
            return
        ours = self._dense.get((Case(batch, context), True))
        times = None if ours is None else ours / tokens_per_s
        self._report.note(
            "transformers",
            f"{name} {batch:4} x {context:5} {tokens_per_s:9.0f} tokens/s"
            + ("" if times is None else f"; ours is {times:.2f} times as fast"),
            {"batch": batch, "context_tokens": context, "tokens_per_s": tokens_per_s,
             "ours_times": times},
        )  # fmt: skip

    def _free_memory(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
