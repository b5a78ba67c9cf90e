"""The native kernel's truncation against the plain form, which sorts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.engine.sampling.batch import Truncation, truncate
from llorch_worker.kernels import select_truncate_rows


def truncation_of(rows: list[tuple[float, int, float]]) -> Truncation:
    """``rows``: min_p, top_k, top_p of each."""
    min_p, top_k, top_p = zip(*rows, strict=True)
    return Truncation(
        rows=None,
        log_min_p=torch.tensor(min_p).log().unsqueeze(1),
        top_k=torch.tensor(top_k).unsqueeze(1),
        top_p=torch.tensor(top_p, dtype=torch.float64).unsqueeze(1),
    )


def truncate_natively(weights: torch.Tensor, scaled: torch.Tensor, truncation: Truncation) -> None:
    truncate_rows = select_truncate_rows(torch.device("cpu"))
    if truncate_rows is None:
        pytest.skip("this machine has no native kernels")
    truncate(weights, scaled, truncation, truncate_rows)


def kept_by(form: object, scaled: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    assert callable(form)
    weights = scaled.softmax(dim=-1)
    before = weights.clone()
    form(weights, scaled, truncation)
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
    truncation = truncation_of([(min_p, min(top_k, vocab), top_p) for min_p, top_k, top_p in rows])
    expected = kept_by(truncate, scaled, truncation)
    assert torch.equal(kept_by(truncate_natively, scaled, truncation), expected)


@pytest.mark.parametrize("form", [truncate_natively, truncate])
def test_forbidden_tokens_stay_excluded_when_top_k_exceeds_the_rest(form: object) -> None:
    scaled = torch.full((2, 300), -math.inf)
    scaled[:, 7], scaled[:, 9] = 2.0, 1.0
    kept = kept_by(form, scaled, truncation_of([(0.0, 5, math.inf), (0.0, 5, 0.99)]))
    assert [row.nonzero().flatten().tolist() for row in kept] == [[7, 9], [7, 9]]


@pytest.mark.parametrize("form", [truncate_natively, truncate])
def test_a_row_without_truncation_stays_whole_beside_truncated_rows(form: object) -> None:
    scaled = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    two = truncation_of([(0.0, 3, math.inf), (0.0, 7, math.inf)])
    truncation = Truncation(torch.tensor([2, 1]), two.log_min_p, two.top_k, two.top_p)
    assert kept_by(form, scaled, truncation).sum(dim=-1).tolist() == [500, 7, 3]
