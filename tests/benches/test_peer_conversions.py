"""Models that peers get in other formats compute what the file does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benches.peers.conversions import hugging_face, vllm
from benches.peers.conversions.converted import WEIGHTS, weight_bits
from llorch_worker.engine import Engine
from llorch_worker.weights import open_checkpoint

IDS = list(range(300, 364))


def test_the_hugging_face_folder_gives_the_files_logits(demo_model: Path, tmp_path: Path) -> None:
    hugging_face.convert(demo_model, tmp_path)
    with Engine.load(demo_model, device="cpu", dtype="float32", max_sequences=1) as engine:
        ours = engine.logits(IDS)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([IDS])).logits[0]
    # Its weights are rounded to bfloat16, ours are not.
    assert torch.corrcoef(torch.stack((ours.ravel(), theirs.ravel())))[0, 1] > 0.999


def test_gptq_packs_eight_weights_a_word_along_the_inputs() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    parts = dict(vllm.QUANTISERS["gptq"]("", weight))
    shifts = torch.arange(8) * 4
    words = parts["qweight"]  # [inputs / 8, outputs]
    values = (words[:, None, :] >> shifts[None, :, None] & 15).reshape(64, 8) - 8
    groups = parts["g_idx"].to(torch.int64)
    restored = values * parts["scales"].float()[groups]
    assert words.dtype == torch.int32
    assert groups.tolist() == [0] * 32 + [1] * 32
    assert bool(((restored.t() - weight).abs() <= 0.6 * parts["scales"].float()[groups].t()).all())
    zeros = parts["qzeros"][:, :, None] >> shifts & 15
    assert zeros.unique().tolist() == [7]


def test_w8a8_has_one_scale_a_row() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    parts = dict(vllm.QUANTISERS["w8a8"]("", weight))
    restored = parts["weight"] * parts["weight_scale"]
    assert parts["weight"].dtype == torch.int8
    assert bool(((restored - weight).abs() <= 0.51 * parts["weight_scale"]).all())


@pytest.mark.parametrize(("kind", "bits"), [("q4_0", 4), ("q8_0", 8), ("f32", 16)])
def test_a_peer_gets_weights_of_about_the_files_width(
    random_models: Path, kind: str, bits: int
) -> None:
    assert weight_bits(open_checkpoint(random_models / f"{kind}.gguf")) == bits
    assert {wanted for _, wanted in WEIGHTS} == {4, 8, 16}
