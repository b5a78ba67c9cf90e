"""The native kernel's truncation against the plain form, which sorts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.kernels import TruncateRows, select_truncate_rows
from llorch_worker.kernels.torch_ops import truncate_rows

Limits = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def limits_of(rows: list[tuple[float, int, float]]) -> Limits:
    """``rows``: min_p, top_k, top_p of each."""
    min_p, top_k, top_p = zip(*rows, strict=True)
    as_doubles = torch.tensor(top_p, dtype=torch.float64)
    return torch.tensor(min_p).log(), torch.tensor(top_k), as_doubles


def truncate_natively(*arguments: Any) -> None:
    native = select_truncate_rows(torch.device("cpu"))
    if native is None:
        pytest.skip("this machine has no native kernels")
    native(*arguments)


def kept_by(
    form: TruncateRows, scaled: torch.Tensor, limits: Limits, rows: torch.Tensor | None = None
) -> torch.Tensor:
    weights = scaled.softmax(dim=-1)
    before = weights.clone()
    form(weights, scaled, rows, *limits)
    assert torch.equal(weights, before * (weights > 0))
    return weights > 0


@settings(max_examples=300)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.01, 0.3, 1.0]),
            st.sampled_from([1, 2, 7, 60, 999, 1_000]),
            st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, math.inf]),
        ),
        min_size=1,
        max_size=5,
    ),
    spread=st.sampled_from([0.0, 0.01, 1.0, 3.0, 12.0]),
    grid=st.sampled_from([0.0, 0.25]),
    vocab=st.sampled_from([5, 16, 129, 1_000]),
    seed=st.integers(0, 1_000),
)
def test_the_native_kernel_keeps_what_sorting_keeps(
    rows: list[tuple[float, int, float]],
    vocab: int,
    spread: float,
    grid: float,
    seed: int,
) -> None:
    """Flat and peaked rows, with ties where the values lie on a grid."""
    scaled = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)) * spread
    if grid:
        scaled = (scaled / grid).round() * grid
    limits = limits_of([(min_p, min(top_k, vocab), top_p) for min_p, top_k, top_p in rows])
    expected = kept_by(truncate_rows, scaled, limits)
    assert torch.equal(kept_by(truncate_natively, scaled, limits), expected)


@pytest.mark.parametrize("form", [truncate_natively, truncate_rows])
def test_forbidden_tokens_stay_excluded_when_top_k_exceeds_the_rest(form: TruncateRows) -> None:
    scaled = torch.full((2, 300), -math.inf)
    scaled[:, 7], scaled[:, 9] = 2.0, 1.0
    kept = kept_by(form, scaled, limits_of([(0.0, 5, math.inf), (0.0, 5, 0.99)]))
    assert [row.nonzero().flatten().tolist() for row in kept] == [[7, 9], [7, 9]]


@pytest.mark.parametrize("form", [truncate_natively, truncate_rows])
def test_a_row_without_truncation_stays_whole_beside_truncated_rows(form: TruncateRows) -> None:
    scaled = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    two = limits_of([(0.0, 3, math.inf), (0.0, 7, math.inf)])
    assert kept_by(form, scaled, two, torch.tensor([2, 1])).sum(dim=-1).tolist() == [500, 7, 3]
