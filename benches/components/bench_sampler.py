"""Sampling the next tokens of sixteen sequences from a vocabulary of 32,000."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benches.components.sizes import VOCAB, randoms
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine.sampling.sampler import Sampler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.kernels.uniforms import uniforms
from tests.text.made_up import made_up_tokenizer

ROWS = 16
ROUNDS = 30
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k_40": {"temperature": 1.0, "top_k": 40},
    "top_p_0.9": {"temperature": 1.0, "top_p": 0.9},
}
# The nucleus of a confident model has a few tokens, that of an unsure model thousands.
SPREADS = {"peaked": 8.0, "flat": 2.0}


@pytest.fixture(scope="module")
def text() -> ChoiceText:
    return ChoiceText(made_up_tokenizer(VOCAB))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.benchmark(group="sampler")
def test_sampler(benchmark: Any, text: ChoiceText, sampling: str, spread: str) -> None:
    logits = randoms(ROWS, VOCAB, dtype=torch.float32, spread=SPREADS[spread])
    fields = SAMPLINGS[sampling]
    request = GenerationRequest(prompt_token_ids=[1], **fields)
    sequences = [Sequence([1], request, seed=row, text=text, arrival=row) for row in range(ROWS)]
    sampler = Sampler(VOCAB, torch.device("cpu"))
    expected = [_plain(row, seed, **fields) for seed, row in enumerate(logits.double())]
    assert sampler.sample(logits.clone(), sequences).token_ids == expected
    # The sampler overwrites its input.
    benchmark.pedantic(
        sampler.sample,
        setup=lambda: ((logits.clone(), sequences), {}),
        rounds=ROUNDS,
        warmup_rounds=3,
    )


def _plain(
    logits: torch.Tensor, seed: int, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> int:
    """Truncates one row, [vocab] float64, by sorting, then inverts its cumulative distribution."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits / temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    before = probabilities[kept].cumsum(-1) - probabilities[kept]
    kept = kept[before < top_p * probabilities[kept].sum()]
    truncated = torch.zeros_like(probabilities).index_copy_(0, kept, probabilities[kept])
    cumulative = truncated.cumsum(-1)
    uniform = uniforms(torch.tensor([seed]), torch.tensor([0]))
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
