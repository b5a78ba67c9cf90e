"""Random models of ``tools/make_model.py`` load, generate and depend on the seed only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine

REPOSITORY = Path(__file__).parents[2]
TOOL = REPOSITORY / "tools" / "make_model.py"
DEMO = str(REPOSITORY / "llorch_worker" / "assets" / "demo.gguf")
MADE = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q6_k")


def make(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny shape as <type>.gguf."""
    folder = tmp_path_factory.mktemp("models")
    for kind in MADE:
        made = make("--shape", "tiny", "--type", kind, "--out", folder / f"{kind}.gguf")
        assert made.returncode == 0, made
        assert f"1,443,072 parameters in {kind}" in made.stdout
    return folder


@pytest.mark.parametrize("kind", ["bf16", "q4_0", "q6_k"])
def test_a_made_model_loads_and_generates_varied_tokens(models: Path, kind: str) -> None:
    with Engine.load(models / f"{kind}.gguf", max_sequences=2) as engine:
        logits = engine.logits(list(range(1, 65)))
        request = GenerationRequest(prompt="hello", max_tokens=64, ignore_eos=True, seed=1)
        said = engine.submit(request).result(60).choices[0]
    assert bool(torch.isfinite(logits).all())
    assert 1 < float(logits.std()) < 10
    assert len(set(logits.argmax(-1).tolist())) > 16
    assert len(set(said.token_ids)) > 16


@pytest.mark.parametrize("kind", MADE)
def test_ggufs_reader_finds_every_tensor_in_its_type(models: Path, kind: str) -> None:
    tensors = gguf.GGUFReader(models / f"{kind}.gguf").tensors
    assert len(tensors) == 3 + 2 * 9
    for tensor in tensors:
        wanted = "F32" if tensor.name.endswith("norm.weight") else kind.upper()
        assert tensor.tensor_type.name == wanted
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        if not tensor.name.endswith("norm.weight"):
            assert abs(values.mean()) < 0.1 * values.std()


@pytest.mark.parametrize(("kind", "number"), [("f32", 0), ("q4_0", 2), ("q8_0", 7), ("q4_k", 14)])
def test_a_made_file_says_its_type(models: Path, kind: str, number: int) -> None:
    fields = gguf.GGUFReader(models / f"{kind}.gguf").fields
    assert fields["general.file_type"].contents() == number


def test_a_seed_gives_the_same_model_in_every_type(models: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    make("--shape", "tiny", "--type", "q8_0", "--out", again)
    make("--shape", "tiny", "--type", "q8_0", "--out", other, "--seed", "1")
    assert again.read_bytes() == (models / "q8_0.gguf").read_bytes() != other.read_bytes()
    exact, coarse = (
        gguf.dequantize(tensor.data, tensor.tensor_type).ravel()
        for tensor in (gguf.GGUFReader(models / f"{k}.gguf").tensors[2] for k in ("f32", "q4_0"))
    )
    assert np.corrcoef(exact, coarse)[0, 1] > 0.99


def test_the_output_matrix_may_have_a_type_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mixed.gguf"
    made = make("--shape", "tiny", "--type", "q4_0", "--output-type", "q6_k", "--out", path)
    assert made.returncode == 0, made
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert (kinds["output.weight"], kinds["token_embd.weight"]) == ("Q6_K", "Q4_0")


def test_a_made_up_vocabulary_encodes_by_merges_and_decodes_to_the_text(models: Path) -> None:
    with Engine.load(models / "q4_0.gguf", max_sequences=1) as engine:
        tokenizer = engine.tokenizer
        for text in ("hello there, world 42", "日本 \N{GRINNING FACE}", ""):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
        words = "".join(tokenizer.token_text(token_id) for token_id in range(259, 400))
        assert len(tokenizer.encode(words, add_special_tokens=False)) < len(words)


def test_a_vocabulary_is_copied_from_a_file_of_the_same_size(
    sentencepiece_vocabulary: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    vocabulary = sentencepiece_vocabulary / "vocab-only.gguf"
    refused = make("--shape", "tiny", "--out", path, "--vocabulary", vocabulary)
    assert refused.returncode == 1
    assert "32,000 tokens but the shape has 512" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--type", "iq1_m"], "iq1_m cannot be written: gguf does not quantise to it"),
        (["--type", "q9"], "unknown block type q9; allowed: f32"),
        (
            ["--weights", DEMO, "--output-type", "iq4_nl"],
            "output.weight: gguf does not quantise weights to iq4_nl",
        ),
        (["--weights", TOOL], f"{TOOL} cannot be read as GGUF"),
    ],
)
def test_a_type_that_cannot_be_written_is_refused_with_the_reason(
    tmp_path: Path, arguments: list[str | Path], reason: str
) -> None:
    refused = make("--shape", "tiny", "--out", tmp_path / "x.gguf", *arguments)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: {reason}")
    assert refused.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
