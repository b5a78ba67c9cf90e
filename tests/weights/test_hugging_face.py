from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.weights import open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole folder with one tensor of each float dtype."""
    torch.manual_seed(0)
    tensors = {
        "double": torch.randn(3, 5, dtype=torch.float64),
        "single": torch.randn(700, 600),
        "half": torch.randn(4, 6, dtype=torch.float16),
        "brain": torch.randn(1200, 700).bfloat16(),
        "mask": torch.ones(2, dtype=torch.bool),
    }
    # As save_pretrained writes it.
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def shard(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"t{i}": torch.randn(10, i + 1) for i in range(5)}
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(2):
        name = f"model-0000{i + 1}-of-00002.safetensors"
        part = {key: value for key, value in tensors.items() if int(key[1]) % 2 == i}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_each_float_dtype_loads_into_each_compute_dtype(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "mask":
            continue
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        assert checkpoint.tensors[name].stored_bytes == tensor.nbytes
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(checkpoint.load(name, dtype), tensor.to(dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e39])
def test_weights_that_are_no_finite_numbers_are_refused(folder: Path, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["double"][1, 2] = value
    tensors["brain"][1199, 3] = value
    tensors["single"][0, 0] = 3e38
    tensors["single"][0, 1] = 3e38
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    for name in ("double", "brain"):
        with pytest.raises(ModelLoadFailed, match=f"tensor {name} has weights that are out of"):
            checkpoint.load(name, torch.float32)
    assert checkpoint.load("single", torch.float32).isfinite().all()
    with pytest.raises(ModelLoadFailed, match="tensor single"):
        checkpoint.load("single", torch.float16)


def test_a_sharded_folder_loads_whole(folder: Path) -> None:
    tensors = shard(folder)
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.load(name, torch.float32), tensor)


def test_a_tensor_comes_from_the_file_that_the_index_gives_it(folder: Path) -> None:
    """Whichever shard is read last, and whatever else a shard holds."""
    tensors = shard(folder)
    for number, extra in ((1, {"t1": torch.zeros(9)}), (2, {"t0": torch.zeros(9)})):
        path = folder / f"model-0000{number}-of-00002.safetensors"
        of_both = load_file(path) | extra | {f"only-in-{number}": torch.ones(1)}
        save_file(of_both, path)
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == {*tensors, "only-in-1", "only-in-2"}
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.load(name, torch.float32), tensor)


def test_metadata_include_the_side_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    metadata = open_checkpoint(folder).metadata
    assert metadata["model_type"] == "llama"
    assert metadata["generation_config"] == {"eos_token_id": [2, 3]}
    assert "tokenizer_config" not in metadata


def test_a_tensor_that_is_not_float_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="tensor mask is stored as BOOL"):
        open_checkpoint(folder).load("mask", torch.float32)


def test_a_missing_tensor_and_a_wrong_shape_are_refused(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ModelLoadFailed, match="has no tensor nothing"):
        checkpoint.load("nothing", torch.float32)
    with pytest.raises(ModelLoadFailed, match=r"half is \[4, 6\] .*calls for \[6, 4\]"):
        checkpoint.read_into("half", torch.empty(6, 4))


def rewrite_header(path: Path, pattern: str, replacement: str) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = re.sub(pattern, replacement, data[8 : 8 + size].decode()).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


INDEX = "model.safetensors.index.json"


def reindex(config: Path, **files: str) -> None:
    """Changes the files that the index gives tensors to."""
    index = config.with_name(INDEX)
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map |= {name: f"{file}-of-00002.safetensors" for name, file in files.items()}
    index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda config, _: config.unlink(), "has no config.json"),
        (lambda config, _: config.write_text("{"), "config.json is not valid JSON"),
        (lambda config, _: config.write_text("[" * 100_000), "is not valid JSON"),
        (lambda config, _: config.write_text("[]"), "is not a JSON object"),
        (lambda _, file: file.unlink(), "holds no weights"),
        (lambda _, file: file.rename(file.with_name("pytorch_model.bin")), "as pickles only"),
        (lambda _, file: file.rename(file.with_name("m.gguf")), "GGUF files; give the path of one"),
        (lambda _, file: os.truncate(file, 0), "is empty"),
        (lambda _, file: os.truncate(file, 7), "header announces"),
        (lambda _, file: os.truncate(file, 100), "header announces"),
        (lambda _, file: os.truncate(file, 3000), "past the end"),
        (lambda _, file: file.write_bytes(b"\xff" * 100), "header announces"),
        (lambda _, file: file.write_bytes(b"\x08" + b"\0" * 7 + b"{}{}{}{}"), "is not valid JSON"),
        (lambda _, file: rewrite_header(file, r".+", "[1, 2]"), "header is not a JSON object"),
        (lambda _, file: rewrite_header(file, "data_offsets", "offsets"), "malformed"),
        (lambda _, file: rewrite_header(file, r"\[700,600\]", "[700,1e400]"), "malformed"),
        (lambda _, file: rewrite_header(file, r'"half"', '"brain"'), "has a tensor twice"),
        (
            lambda _, file: rewrite_header(file, r'offsets":\[\d+', 'offsets":[1e400'),
            "malformed",
        ),
        (
            lambda _, file: rewrite_header(file, r"\[700,600\]", "[700,601]"),
            "does not have the bytes of its shape",
        ),
        (
            lambda config, _: (
                shard(config.parent),
                config.with_name("model-00002-of-00002.safetensors").unlink(),
            ),
            "lacks model-00002-of-00002.safetensors",
        ),
        (lambda config, _: config.with_name(INDEX).write_text("{}"), "has no weight_map"),
        (
            lambda config, _: config.with_name(INDEX).write_text(
                '{"weight_map": {"a": "../elsewhere.safetensors"}}'
            ),
            "lacks ../elsewhere",
        ),
        (
            lambda config, _: (shard(config.parent), reindex(config, t0="model-00002")),
            "model-00002-of-00002.safetensors lacks tensor t0, which .* says it holds",
        ),
        (
            lambda config, _: (shard(config.parent), reindex(config, t9="model-00001")),
            "model-00001-of-00002.safetensors lacks tensor t9",
        ),
        (
            lambda config, file: (shard(config.parent), save_file({"a": torch.ones(1)}, file)),
            "holds both model.safetensors and model.safetensors.index.json",
        ),
        (
            lambda config, _: (
                shard(config.parent),
                [
                    save_file(load_file(path) | {"twice": torch.ones(1)}, path)
                    for path in config.parent.glob("*-of-*.safetensors")
                ],
            ),
            "model-00002-of-00002.safetensors has tensor twice, and so has model-00001-of-00002",
        ),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(
    folder: Path, damage: Callable[[Path, Path], object], message: str
) -> None:
    damage(folder / "config.json", folder / "model.safetensors")
    with pytest.raises(ModelLoadFailed, match=message) as raised:
        open_checkpoint(folder)
    assert str(folder) in raised.value.message
    assert "\n" not in raised.value.message
    assert "; " in raised.value.message
