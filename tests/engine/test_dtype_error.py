"""What bfloat16 costs in accuracy, with every variant of the native kernels and with torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from tests.kernels.native import runnable_variants

PROMPT = "Once upon a time"
TOKENS = 250


@pytest.mark.parametrize(("file", "most_nats"), [("q8_0.gguf", 0.0004), ("q4_0.gguf", 0.0005)])
def test_every_variant_stays_close_to_float32(
    trained_model: Path, file: str, most_nats: float
) -> None:
    """Each reads a greedy text of the reference. Native kernels multiply a quantised model's
    weights with 8-bit activations; torch's dequantise it to bfloat16."""
    request = GenerationRequest(prompt=PROMPT, max_tokens=TOKENS, temperature=0, ignore_eos=True)
    with Engine.load(trained_model / file, device="cpu", dtype="float32") as engine:
        text = engine.submit(request).result(600).choices[0].token_ids
        ids = [*engine.tokenizer.encode(PROMPT), *text]
        exact = engine.logits(ids)
    for kernels in [*runnable_variants(), "torch"]:
        with Engine.load(
            trained_model / file, device="cpu", dtype="bfloat16", kernels=kernels
        ) as engine:
            logits = engine.logits(ids)
        divergence = torch.nn.functional.kl_div(
            logits.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True
        )
        nats = float(divergence.sum(-1).mean())
        same_top_token = float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
        assert 0 < nats <= most_nats, kernels
        assert same_top_token > 0.97, (kernels, same_top_token)
