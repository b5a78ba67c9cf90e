"""The cost of masks: created, looked up in the one cached mask, and applied to scores.

Warm: repeated calls. Cold: calls after the processor's caches were filled with other data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benches.components.sizes import CONTEXT_TOKENS, HEADS, randoms
from llorch_worker.cache import CausalMasks

CPU = torch.device("cpu")
MAX_QUERY_TOKENS = 1024
COLD_ROUNDS = 20
LENGTHS = pytest.mark.parametrize("tokens", [8, 32, 128, 512])
TEMPERATURES = pytest.mark.parametrize("caches", ["cold", "warm"])


@pytest.fixture(scope="module")
def masks() -> CausalMasks:
    """The engine's mask, of which every smaller mask is a view."""
    return CausalMasks(max_query=MAX_QUERY_TOKENS, max_context=CONTEXT_TOKENS, device=CPU)


def measure(
    benchmark: Any, work: Callable[[], Any], caches: str, evict: Callable[[], None]
) -> None:
    if caches == "warm":
        benchmark(work)
    else:
        benchmark.pedantic(work, setup=evict, rounds=COLD_ROUNDS)


def plain_mask(tokens: int) -> torch.Tensor:
    return torch.tensor([[key <= query for key in range(tokens)] for query in range(tokens)])


@LENGTHS
@TEMPERATURES
@pytest.mark.benchmark(group="causal_mask_create")
def test_causal_mask_create(
    benchmark: Any, tokens: int, caches: str, evict: Callable[[], None]
) -> None:
    def create() -> torch.Tensor:
        return CausalMasks(max_query=tokens, max_context=tokens, device=CPU).view(tokens, tokens)

    assert torch.equal(create(), plain_mask(tokens))
    measure(benchmark, create, caches, evict)


@LENGTHS
@TEMPERATURES
@pytest.mark.benchmark(group="causal_mask_lookup")
def test_causal_mask_lookup(
    benchmark: Any, masks: CausalMasks, tokens: int, caches: str, evict: Callable[[], None]
) -> None:
    assert torch.equal(masks.view(tokens, tokens), plain_mask(tokens))
    measure(benchmark, lambda: masks.view(tokens, tokens), caches, evict)


@LENGTHS
@TEMPERATURES
@pytest.mark.benchmark(group="causal_mask_apply")
def test_causal_mask_apply(
    benchmark: Any,
    dtype: torch.dtype,
    masks: CausalMasks,
    tokens: int,
    caches: str,
    evict: Callable[[], None],
) -> None:
    """Applied to the scores of 32 heads."""
    scores = randoms(HEADS, tokens, tokens, dtype=dtype)
    mask = masks.view(tokens, tokens)
    hidden = torch.tensor(-torch.inf, dtype=dtype)

    def apply() -> torch.Tensor:
        return torch.where(mask, scores, hidden)

    expected = scores.masked_fill(~plain_mask(tokens), -torch.inf)
    assert torch.equal(apply(), expected)
    measure(benchmark, apply, caches, evict)
