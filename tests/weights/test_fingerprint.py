"""What a fingerprint covers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from llorch_worker.weights import fingerprint, open_checkpoint
from llorch_worker.weights.fingerprint import SAMPLE_BYTES
from tests.encoders import write_encoder


def fingerprint_of(path: Path) -> str:
    return fingerprint(open_checkpoint(path))


@pytest.fixture
def gguf_copy(trained_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(trained_model / "q8_0.gguf", tmp_path / "renamed.gguf"))


@pytest.fixture
def folder_copy(trained_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_model / "hf", tmp_path / "renamed"))


def test_a_copy_has_the_same_fingerprint(
    trained_model: Path, gguf_copy: Path, folder_copy: Path
) -> None:
    assert fingerprint_of(gguf_copy) == fingerprint_of(trained_model / "q8_0.gguf")
    assert fingerprint_of(folder_copy) == fingerprint_of(trained_model / "hf")


def test_each_quantisation_and_format_has_its_own(trained_model: Path) -> None:
    paths = [trained_model / name for name in ("f32.gguf", "q8_0.gguf", "q4_0.gguf", "hf")]
    assert len({fingerprint_of(path) for path in paths}) == len(paths)


def test_every_tensor_counts(gguf_copy: Path) -> None:
    """Scaled, as training would change it."""
    tensors = GGUFReader(gguf_copy).tensors
    whole, found = gguf_copy.read_bytes(), {fingerprint_of(gguf_copy)}
    for tensor in tensors:
        changed = np.frombuffer(whole, np.uint8).copy()
        changed[tensor.data_offset : tensor.data_offset + tensor.n_bytes] ^= 1
        gguf_copy.write_bytes(changed.tobytes())
        found.add(fingerprint_of(gguf_copy))
    assert len(found) == 1 + len(tensors)


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_tensors_ends_count(gguf_copy: Path, at: str) -> None:
    before = fingerprint_of(gguf_copy)
    tensor = max(GGUFReader(gguf_copy).tensors, key=lambda each: each.n_bytes)
    assert tensor.n_bytes > 2 * SAMPLE_BYTES
    changed = bytearray(gguf_copy.read_bytes())
    changed[tensor.data_offset + (0 if at == "first" else tensor.n_bytes - 1)] ^= 1
    gguf_copy.write_bytes(changed)
    assert fingerprint_of(gguf_copy) != before


def test_a_gguf_files_template_counts(gguf_copy: Path, trained_model: Path) -> None:
    changed = gguf_copy.read_bytes().replace(b"tokenizer.ggml.bos", b"tokenizer.ggml.box", 1)
    gguf_copy.write_bytes(changed)
    assert fingerprint_of(gguf_copy) != fingerprint_of(trained_model / "q8_0.gguf")


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json"],
)
def test_what_describes_a_folder_counts(folder_copy: Path, name: str) -> None:
    before = fingerprint_of(folder_copy)
    file = folder_copy / name
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | {"x": 1}))
    assert fingerprint_of(folder_copy) != before


def test_a_named_template_of_a_folder_counts(folder_copy: Path) -> None:
    before = fingerprint_of(folder_copy)
    (folder_copy / "additional_chat_templates").mkdir()
    (folder_copy / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    assert fingerprint_of(folder_copy) != before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true}'),
        ("modules.json", "[]"),
        ("sentence_bert_config.json", '{"max_seq_length": 20}'),
        ("config_sentence_transformers.json", '{"default_prompt_name": "query"}'),
    ],
)
def test_what_makes_vectors_counts(tmp_path: Path, name: str, text: str) -> None:
    before = fingerprint_of(write_encoder(tmp_path))
    (tmp_path / name).write_text(text)
    assert fingerprint_of(tmp_path) != before
