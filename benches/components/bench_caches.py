"""A decode step with one cache for all layers, against a separate cache in every layer.

``unified`` is the engine's cache: one pair of RoPE tables read once per pass, one causal mask, keys
and values written in place. ``separate`` gives each layer its own tables and masks to read.
``grown`` also appends keys and values by concatenation, as a model without blocks does. All three
end with the same angles and the same keys and values in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from benches.components.bench_causal_mask import TEMPERATURES, measure
from benches.components.sizes import HEAD_DIM, HEADS, ROPE_THETA, randoms
from llorch_worker.cache import CausalMasks, RopeTables

LAYERS = 32
MAX_CONTEXT_TOKENS = 2048
CONTEXTS = pytest.mark.parametrize("context", [128, 512, 2000])
DTYPE = torch.bfloat16
CPU = torch.device("cpu")

Pass = Callable[[], torch.Tensor]


def tables() -> RopeTables:
    return RopeTables(
        head_dim=HEAD_DIM,
        theta=ROPE_THETA,
        scaling=None,
        max_context=MAX_CONTEXT_TOKENS,
        device=CPU,
    )


def masks() -> CausalMasks:
    return CausalMasks(max_query=MAX_CONTEXT_TOKENS, max_context=MAX_CONTEXT_TOKENS, device=CPU)


@dataclass(frozen=True)
class Step:
    """The new token of one sequence, at ``position``."""

    position: torch.Tensor
    context: int
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def at(cls, context: int) -> Step:
        k, v = (randoms(1, HEADS, HEAD_DIM, dtype=DTYPE, seed=seed) for seed in (1, 2))
        return cls(torch.tensor([context - 1]), context, k, v)


def unified(step: Step) -> Pass:
    rope, mask = tables(), masks()
    shape = (LAYERS, MAX_CONTEXT_TOKENS, HEADS, HEAD_DIM)
    keys, values = torch.zeros(shape, dtype=DTYPE), torch.zeros(shape, dtype=DTYPE)
    layers = list(zip(keys.unbind(), values.unbind(), strict=True))

    def run() -> torch.Tensor:
        cos, sin = rope.at(step.position)
        mask.view(1, step.context)
        for own_keys, own_values in layers:
            own_keys.index_copy_(0, step.position, step.k)
            own_values.index_copy_(0, step.position, step.v)
        return torch.cat((cos, sin, keys[-1, step.position].view(1, -1)), dim=-1)

    return run


def separate(step: Step, *, grown: bool = False) -> Pass:
    ropes, all_masks = [tables() for _ in range(LAYERS)], [masks() for _ in range(LAYERS)]
    length = step.context - 1 if grown else MAX_CONTEXT_TOKENS
    shape = (length, HEADS, HEAD_DIM)
    layers = [
        (torch.zeros(shape, dtype=DTYPE), torch.zeros(shape, dtype=DTYPE)) for _ in range(LAYERS)
    ]

    def run() -> torch.Tensor:
        for rope, mask, (keys, values) in zip(ropes, all_masks, layers, strict=True):
            cos, sin = rope.at(step.position)
            mask.view(1, step.context)
            if grown:
                new_keys = torch.cat((keys, step.k))
                torch.cat((values, step.v))
            else:
                keys.index_copy_(0, step.position, step.k)
                values.index_copy_(0, step.position, step.v)
                new_keys = keys
        return torch.cat((cos, sin, new_keys[step.position].view(1, -1)), dim=-1)

    return run


WAYS: dict[str, Callable[[Step], Pass]] = {
    "unified": unified,
    "separate": separate,
    "grown": lambda step: separate(step, grown=True),
}


@pytest.mark.parametrize("way", WAYS)
@CONTEXTS
@TEMPERATURES
@pytest.mark.benchmark(group="caches_in_a_decode_step")
def test_caches(
    benchmark: Any, context: int, way: str, caches: str, evict: Callable[[], None]
) -> None:
    step = Step.at(context)
    run = WAYS[way](step)
    if way != "unified":
        assert torch.equal(run(), unified(step)())
    measure(benchmark, run, caches, evict)
