"""Two-stage searches of a vocabulary against one stage over all of it."""

from __future__ import annotations

import pytest
import torch

from llorch_worker.engine.sampling.sampler import SEGMENT, inverse_cumulative, likeliest

VOCABULARIES = [1, 50, SEGMENT, SEGMENT + 1, 32_016, 128_256]


def random(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_likeliest_is_the_first_of_the_largest(vocab: int) -> None:
    values = random(5, vocab).round()  # many ties
    values[4] = -torch.inf
    assert torch.equal(likeliest(values), values.argmax(dim=-1))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_inverse_cumulative_agrees_with_one_long_cumulative_sum(vocab: int) -> None:
    weights = random(64, vocab).softmax(dim=-1)
    weights[:, ::3] = 0 if vocab > 1 else weights[:, ::3]
    uniforms = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms.unsqueeze(1) * cumulative[:, -1:]
    expected = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    assert torch.equal(inverse_cumulative(weights, uniforms), expected)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_row_is_searched_alike_alone_and_in_a_batch(vocab: int) -> None:
    weights = random(16, vocab).softmax(dim=-1)
    uniforms = torch.linspace(0, 1 - 2**-52, 16, dtype=torch.float64)
    together = inverse_cumulative(weights, uniforms)
    alone = [
        inverse_cumulative(weights[row : row + 1], uniforms[row : row + 1]) for row in range(16)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_the_ends_fall_on_the_first_and_the_last_token_that_has_weight() -> None:
    weights = torch.zeros(2, 1_000)
    weights[:, 130:140] = 0.1
    ends = torch.tensor([0.0, 1 - 2**-52], dtype=torch.float64)
    assert inverse_cumulative(weights, ends).tolist() == [130, 139]
