"""The warm-up launches every kernel variant that a later step can need."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from benches.gpu.random_model import random_llama
from llorch_worker.cache import Places, UnifiedCache
from llorch_worker.engine.device.warm_up import compile_kernels, sizes
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.kernels.quantised_matrix import QuantisedMatrix
from llorch_worker.kernels.triton import (
    TritonOps,
    attention_work,
    gate_and_mul,
    paged_attention,
    quantised_linear,
    rms_norm,
    rope_and_write,
)
from llorch_worker.model import RaggedBatch, Transformer
from llorch_worker.weights.quantised_linear import QuantisedLinear
from tests.kernels.interpreter import DEVICE
from tests.kernels.test_triton_model import CONFIG

KERNELS = [
    (attention_work, "_list"),
    (paged_attention, "_attend"),
    (paged_attention, "_join"),
    (quantised_linear, "_multiply"),
    (quantised_linear, "_dequantise"),
    (rms_norm, "_rms_norm"),
    (rope_and_write, "_rope_and_write"),
    (gate_and_mul, "_gate_and_mul"),
]
MAX_SEQUENCES, MAX_STEP_TOKENS, MAX_CONTEXT, SCORED_ROWS = 21, 200, 96, 64
PROCESSORS = 32


class Variants:
    """Replaces kernels: records what each launch would be compiled for, and launches nothing.

    Run-time numbers create no variants if they are constants of the model; the kernels' decorators
    exclude the others.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def of(self, name: str) -> Any:
        variants = self

        class Kernel:
            def __getitem__(self, _grid: tuple[int, ...]) -> Callable[..., None]:
                return self.launch

            def launch(self, *arguments: Any, **constants: Any) -> None:
                dtypes = [a.dtype for a in arguments if isinstance(a, torch.Tensor)]
                variants.seen.add((name, *dtypes, *sorted(constants.items())))

        return Kernel()


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Variants:
    found = Variants()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, found.of(name))
    monkeypatch.setattr(quantised_linear, "_processors", lambda _: PROCESSORS)
    monkeypatch.setattr(attention_work, "PIECE", MAX_CONTEXT // 3)
    return found


def quantised() -> Transformer:
    model = random_llama(CONFIG, TritonOps(PROCESSORS), dtype=torch.bfloat16, device=DEVICE)
    for block in model.blocks:
        for layer, name in ((block.attention, "qkv"), (block.mlp, "down")):
            setattr(layer, name, quantised_linear_of(*getattr(layer, name).weight.shape))
    return replace(model, output=quantised_linear_of(2000, CONFIG.hidden_size))


def quantised_linear_of(rows: int, columns: int) -> QuantisedLinear:
    codes = torch.zeros(rows, columns, dtype=torch.uint8, device=DEVICE)
    scales = torch.ones(rows, columns // 32, device=DEVICE)
    matrix = QuantisedMatrix.pack(codes, scales, None, bits=4, zero=8, factor=1.0)
    return QuantisedLinear((matrix,), quantised_linear.quantised_linear)


def test_no_step_needs_another_variant_after_the_warm_up(variants: Variants) -> None:
    model = quantised()
    shape = cache_shape(CONFIG, MAX_CONTEXT, dtype=torch.bfloat16, device=DEVICE)
    cache = UnifiedCache.allocate(shape, 1)
    compile_kernels(model, cache, MAX_SEQUENCES, MAX_STEP_TOKENS, SCORED_ROWS)
    warm = set(variants.seen)
    assert {variant[0] for variant in warm} == {name for _, name in KERNELS}
    dice = random.Random(5)
    for _ in range(150):
        model.forward(any_step(dice), cache)
    assert variants.seen == warm


def any_step(dice: random.Random) -> RaggedBatch:
    """A mix of decodes and prompt chunks that a scheduler could form."""
    decodes = dice.randint(0, MAX_SEQUENCES)
    lengths = [1] * decodes
    while len(lengths) < MAX_SEQUENCES and (not lengths or dice.random() < 0.5):
        room = MAX_STEP_TOKENS - sum(lengths)
        if not room:
            break
        lengths.append(dice.randint(1, min(MAX_CONTEXT, room)))
    tokens = sum(lengths)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    return RaggedBatch(
        token_ids=zeros,
        positions=zeros,
        query_lengths=tuple(lengths),
        context_lengths=(MAX_CONTEXT,) * len(lengths),
        places=(Places(zeros[: len(lengths), None].int(), zeros),),
        logits_rows=zeros[: dice.randint(0, len(lengths))],
        read_logits=partial(read_some, zeros[: dice.randint(1, SCORED_ROWS)]),
    )


def read_some(rows: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Scores these rows of the step."""
    logits_of(rows)


@pytest.mark.parametrize(
    ("most", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_sizes_are_powers_of_two_and_the_maximum(most: int, expected: list[int]) -> None:
    assert list(sizes(most)) == expected
