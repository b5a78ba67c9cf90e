"""Greedy tokens and draws of the Triton kernel and its torch twin."""

from __future__ import annotations

import math

import pytest
import torch

from llorch_worker.kernels import select_sample, torch_ops
from llorch_worker.kernels.triton import sample as triton_sample
from tests.kernels.interpreter import DEVICE

SAMPLE = [torch_ops.sample, triton_sample.sample]
IDS = ["torch", "triton"]


def column(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("sample", SAMPLE, ids=IDS)
def test_temperature_0_takes_the_first_maximum(sample):
    logits = torch.zeros(2, 5000, device=DEVICE)
    logits[0, [4500, 4800]] = 3.0
    chosen = sample(logits, column(0, 0), column(-math.inf, -math.inf), column(0.5, 0.9).double())
    assert chosen.tolist() == [4500, 0]


@pytest.mark.parametrize("sample", SAMPLE, ids=IDS)
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(sample):
    probabilities = torch.tensor([0.1, 0.0, 0.4, 0.3, 0.2], device=DEVICE)
    uniforms = column(0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.7999, 0.8001, dtype=torch.float64)
    rows = len(uniforms)
    chosen = sample(
        probabilities.log().expand(rows, -1).contiguous(),
        torch.ones(rows, device=DEVICE),
        torch.full((rows,), -math.inf, device=DEVICE),
        uniforms,
    )
    assert chosen.tolist() == [0, 0, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("sample", SAMPLE, ids=IDS)
def test_min_p_excludes_tokens_below_its_share_of_the_likeliest(sample):
    logits = column(0.0, math.log(0.5), math.log(0.3), math.log(0.1)).expand(2, -1).contiguous()
    chosen = sample(
        logits, column(1, 1), column(math.log(0.4), -math.inf), column(0.999, 0.999).double()
    )
    assert chosen.tolist() == [1, 3]


def test_triton_draws_the_same_tokens_as_the_twin():
    generator = torch.Generator().manual_seed(0)
    rows, vocab = 24, 9001
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(DEVICE)
    temperatures = (torch.arange(rows) % 4 / 2).to(DEVICE)
    floors = torch.where(torch.arange(rows) % 3 == 0, math.log(0.05), -math.inf).to(DEVICE)
    uniforms = torch.rand(rows, generator=generator, dtype=torch.float64).to(DEVICE)
    expected = torch_ops.sample(logits, temperatures, floors, uniforms)
    assert torch.equal(triton_sample.sample(logits, temperatures, floors, uniforms), expected)


def test_cards_sample_with_the_kernel_or_its_twin_but_the_cpu_with_neither():
    card = torch.device("cuda")
    assert select_sample(card) is triton_sample.sample
    assert select_sample(card, "torch") is torch_ops.sample
    assert select_sample(torch.device("cpu")) is None
