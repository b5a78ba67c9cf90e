"""Greedy tokens and draws of the Triton kernel and its torch twin."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from llorch_worker.kernels import SampledRows, select_sample, torch_ops
from llorch_worker.kernels.triton import sample as triton_sample
from llorch_worker.kernels.uniforms import uniforms
from tests.kernels.interpreter import DEVICE, INTERPRETED
from tests.sizes import sized

SAMPLE = [torch_ops.sample, triton_sample.sample]
IDS = ["torch", "triton"]
OFF = (0.0, 10**6, math.inf)


def rows_of(temperatures: list[float], limits: list[tuple[float, int, float]]) -> SampledRows:
    """``limits``: min_p, top_k and top_p of each row; seeds count from 0."""
    min_p, top_k, top_p = zip(*limits, strict=True)
    return SampledRows(
        temperatures=torch.tensor(temperatures, dtype=torch.float32, device=DEVICE),
        log_min_p=torch.tensor(min_p, dtype=torch.float32, device=DEVICE).log(),
        top_k=torch.tensor(top_k, device=DEVICE),
        top_p=torch.tensor(top_p, dtype=torch.float64, device=DEVICE),
        seeds=torch.arange(len(limits), device=DEVICE),
        truncates=any(limit != OFF for limit in limits),
    )


def positions(count: int) -> torch.Tensor:
    return torch.arange(count, device=DEVICE) * 7


def drawn(sample, row: list[float], limit: tuple[float, int, float]) -> set[int]:
    """What one row of logits gives at 24 shares from nearly 0 to nearly 1."""
    rows = rows_of([1.0] * 24, [limit] * 24)
    seeds = torch.arange(2000, device=DEVICE)
    by_share = uniforms(seeds, torch.zeros_like(seeds)).argsort()
    rows = replace(rows, seeds=seeds[by_share[torch.linspace(0, 1999, 24).long()]])
    logits = torch.tensor(row, device=DEVICE).expand(24, -1).contiguous()
    return set(sample(logits, rows, torch.zeros_like(rows.seeds)).tolist())


@pytest.mark.parametrize("sample", SAMPLE, ids=IDS)
def test_temperature_0_takes_the_first_maximum(sample):
    logits = torch.zeros(2, 5000, device=DEVICE)
    logits[0, [4500, 4800]] = 3.0
    chosen = sample(logits, rows_of([0, 0], [OFF, (0.5, 3, 0.2)]), positions(2))
    assert chosen.tolist() == [4500, 0]


@pytest.mark.parametrize("sample", SAMPLE, ids=IDS)
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(sample):
    probabilities = torch.tensor([0.1, 0.0, 0.4, 0.3, 0.2], dtype=torch.float64, device=DEVICE)
    rows = rows_of([1.0] * 50, [OFF] * 50)
    shares = uniforms(rows.seeds, positions(50))
    expected = torch.searchsorted(probabilities.cumsum(0), shares, right=True)
    logits = probabilities.float().log().expand(50, -1).contiguous()
    assert torch.equal(sample(logits, rows, positions(50)), expected)
    assert len(set(expected.tolist())) == 4


LN = [0.0, math.log(0.5), math.log(0.3), math.log(0.3), math.log(0.1)]


@pytest.mark.parametrize("sample", SAMPLE, ids=IDS)
@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (OFF, {0, 1, 2, 3, 4}),
        ((0.4, 10**6, math.inf), {0, 1}),
        ((0.0, 1, math.inf), {0}),
        ((0.0, 3, math.inf), {0, 1, 2, 3}),  # the third ties with the fourth
        ((0.0, 10**6, 0.6), {0, 1}),
        ((0.0, 10**6, 0.7), {0, 1, 2, 3}),
        ((0.0, 10**6, 1e-9), {0}),
        ((0.0, 2, 0.5), {0}),
        ((0.0, 3, 0.84), {0, 1, 2, 3}),  # of the three that top_k leaves, not of four
        ((0.0, 3, 0.83), {0, 1}),
        ((0.4, 4, 0.9), {0, 1}),
    ],
)
def test_a_limit_keeps_ties_and_excludes_all_below(sample, limit, kept):
    assert drawn(sample, LN, limit) == kept


@pytest.mark.parametrize("sample", SAMPLE, ids=IDS)
def test_forbidden_tokens_are_never_drawn(sample):
    row = [-math.inf] * 300
    row[7], row[9] = 2.0, 1.0
    for limit in (OFF, (0.0, 5, math.inf), (0.0, 5, 0.99), (0.01, 10**6, 0.99)):
        assert drawn(sample, row, limit) == {7, 9}


@pytest.mark.parametrize("spread", sized(usual=[3.0], full=[0.0, 0.01, 3.0, 12.0]))
@pytest.mark.parametrize("grid", [0.0, 0.25])
def test_triton_draws_the_same_tokens_as_the_twin(spread, grid):
    """Where values lie on a grid, many tie at every threshold."""
    generator = torch.Generator().manual_seed(0)
    count, vocab = 24, 9001
    logits = (spread * torch.randn(count, vocab, generator=generator)).to(DEVICE)
    if grid:
        logits = (logits / grid).round() * grid
    limits = [
        (min_p, top_k, top_p)
        for min_p in (0.0, 0.02)
        for top_k in (10**6, 1, 40, 8000)
        for top_p in (math.inf, 0.9, 0.3)
    ]
    rows = rows_of([row % 5 / 2 for row in range(count)], limits)
    assert torch.equal(
        triton_sample.sample(logits, rows, positions(count)),
        torch_ops.sample(logits, rows, positions(count)),
    )


@pytest.mark.skipif(not INTERPRETED, reason="counts calls of interpreted code")
def test_a_threshold_is_found_in_a_bounded_number_of_passes(monkeypatch):
    """The search halves what 32 bits can hold, not what a row happens to contain."""
    passes = []
    weights = triton_sample._weights
    monkeypatch.setattr(
        triton_sample, "_weights", lambda *row: (passes.append(1), weights(*row))[1]
    )
    logits = torch.tensor([[-1e30, -1e-38, 0.0, 1e-38, 1e30, *[5.0] * 11]], device=DEVICE)
    triton_sample.sample(logits, rows_of([1.0], [(0.0, 3, 0.9)]), positions(1))
    assert 0 < len(passes) <= 11 + 1 + 11 + 2


def test_cards_sample_with_the_kernel_or_its_twin_but_the_cpu_with_neither():
    card = torch.device("cuda")
    assert select_sample(card) is triton_sample.sample
    assert select_sample(card, "torch") is torch_ops.sample
    assert select_sample(torch.device("cpu")) is None
