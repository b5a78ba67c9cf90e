from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.weights import RopeOrder, open_checkpoint
from llorch_worker.weights.gguf import can_dequantise

WriteGguf = Callable[..., Path]
TYPES = [type_ for type_ in gguf.GGML_QUANT_SIZES if can_dequantise(type_)]


def test_every_type_that_gguf_dequantises_is_known() -> None:
    assert {type_.name for type_ in TYPES} >= {
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    }


@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.name)
def test_each_block_type_loads_like_gguf_dequantises_it(
    tmp_path: Path, write_gguf: WriteGguf, type_: gguf.GGMLQuantizationType
) -> None:
    rows, columns = 700, 512  # more than one chunk, and a last one that is not full
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    generator = np.random.default_rng(type_.value)
    blocks = generator.integers(0, 256, (rows * columns // block, block_bytes), np.uint8)
    with np.errstate(all="ignore"):  # random bytes make infinite and NaN scales as well
        finite = np.isfinite(dequantize(blocks, type_).reshape(len(blocks), -1)).all(axis=1)
        blocks[~finite] &= 0x3F
        stored = blocks.reshape(rows, -1)
        expected = dequantize(stored, type_).reshape(rows, columns)
    path = write_gguf(tmp_path / "one.gguf", tensors={"blk.0.ffn_up.weight": (stored, type_)})
    checkpoint = open_checkpoint(path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.tensors[name].shape == (rows, columns)
    assert checkpoint.tensors[name].dtype_name == type_.name
    assert checkpoint.tensors[name].stored_bytes == stored.nbytes
    with np.errstate(all="ignore"):
        loaded = checkpoint.load(name, torch.float32)
    np.testing.assert_array_equal(loaded.numpy(), expected)


def test_both_formats_give_the_same_tensors_under_the_same_names(trained_model: Path) -> None:
    from_gguf = open_checkpoint(trained_model / "f32.gguf")
    from_folder = open_checkpoint(trained_model / "hf")
    assert set(from_gguf.tensors) == set(from_folder.tensors)
    for name in from_folder.tensors:
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else None
        order = None if heads is None else RopeOrder(heads, 32, 32, interleaved=True)
        loaded = from_gguf.load(name, torch.float32, order)
        assert torch.equal(loaded, from_folder.load(name, torch.float32))


def test_a_tensor_loads_in_the_requested_dtype(tmp_path: Path, write_gguf: WriteGguf) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    exact = checkpoint.load("lm_head.weight", torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(checkpoint.load("lm_head.weight", dtype), exact.to(dtype))


def test_a_tensor_fills_a_slice_of_a_larger_one(tmp_path: Path, write_gguf: WriteGguf) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    whole = torch.full((100, 64), 7.0)
    checkpoint.read_into("lm_head.weight", whole[10:90])
    assert torch.equal(whole[10:90], checkpoint.load("lm_head.weight", torch.float32))
    assert (whole[:10] == 7).all()
    assert (whole[90:] == 7).all()


def test_metadata_are_plain_python_values(trained_model: Path) -> None:
    metadata = open_checkpoint(trained_model / "f32.gguf").metadata
    reader = gguf.GGUFReader(trained_model / "f32.gguf")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert metadata[key] == field.contents()
            assert type(metadata[key]) is type(field.contents())


def test_a_token_that_is_not_utf8_survives(tmp_path: Path, write_gguf: WriteGguf) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": ["ok", "QQQQ"]})
    path.write_bytes(path.read_bytes().replace(b"QQQQ", b"\xff\xfe\x80\xe2"))
    tokens = open_checkpoint(path).metadata["tokenizer.ggml.tokens"]
    assert tokens[0] == "ok"
    assert tokens[1].encode("utf-8", "surrogateescape") == b"\xff\xfe\x80\xe2"


def write_split(folder: Path, count: int, tensors: int | None = None) -> list[Path]:
    paths = []
    for part in range(count):
        path = folder / f"m-{part + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", count if tensors is None else tensors)
        writer.add_tensor(f"blk.{part}.ffn_up.weight", np.full((4, 32), part, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_a_split_model_opens_from_any_part(tmp_path: Path) -> None:
    for path in write_split(tmp_path, 3):
        checkpoint = open_checkpoint(path)
        for part in range(3):
            loaded = checkpoint.load(f"model.layers.{part}.mlp.up_proj.weight", torch.float32)
            assert (loaded == part).all()


def test_a_split_model_with_a_missing_part_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(ModelLoadFailed, match=r"00002-of-00003\.gguf is missing"):
        open_checkpoint(paths[0])


def test_a_renamed_part_is_refused(tmp_path: Path) -> None:
    path = write_split(tmp_path, 2)[0].rename(tmp_path / "m.gguf")
    with pytest.raises(ModelLoadFailed, match="is one of 2 parts"):
        open_checkpoint(path)


def test_parts_that_are_not_what_their_names_say_are_refused(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    first, second, third = write_split(tmp_path, 3)
    second.rename(tmp_path / "other")
    third.rename(second)
    (tmp_path / "other").rename(third)
    with pytest.raises(ModelLoadFailed, match=r"00002-of-00003.gguf is part 2 of its model"):
        open_checkpoint(first)
    write_gguf(second)
    with pytest.raises(ModelLoadFailed, match=r"00002-of-00003.gguf is a whole model but"):
        open_checkpoint(first)
    paths = write_split(tmp_path, 2, tensors=3)
    with pytest.raises(ModelLoadFailed, match=r"its parts hold 2 tensors, but 3 were split"):
        open_checkpoint(paths[1])


def test_a_wrong_count_in_a_large_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    array, of_bytes, count = 9, 0, 150_000_000
    path.write_bytes(b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"a", array, of_bytes, count))
    os.truncate(path, 200_000_000)
    with pytest.raises(ModelLoadFailed, match="items in its arrays is 150000000, but may be at"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"not a model", "is not a GGUF file"),
        (lambda data: data[:4], "truncated or damaged"),
        (lambda data: data[:300], "truncated or damaged"),
        (lambda data: data[:-1], "is truncated .*tensor"),
        (lambda data: data[: len(data) // 2], "is truncated .*tensor"),
        (lambda data: data[:4] + b"\x01\0\0\0" + data[8:], "GGUF version 1"),
        (lambda data: data[:4] + b"\0\0\0\x03" + data[8:], "is big-endian"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "announces"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "announces"),
        (lambda data: data[:24] + b"\xff" * 8 + data[32:], "runs past the end"),
        (lambda data: data.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"), "twice"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(
    tmp_path: Path, write_gguf: WriteGguf, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelLoadFailed, match=message) as raised:
        open_checkpoint(path)
    assert str(path) in raised.value.message
    assert "\n" not in raised.value.message
    assert re.search(r"; .+\.$", raised.value.message), "no remedy"


@pytest.mark.parametrize(
    ("type_id", "message"),
    [(200, "unknown block type 200"), (9, "Q8_1, which cannot be dequantised")],
)
def test_an_unreadable_block_type_is_refused(
    tmp_path: Path, write_gguf: WriteGguf, type_id: int, message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(b"output.weight") + len("output.weight") + 4 + 2 * 8
    data[at : at + 4] = type_id.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelLoadFailed, match=message):
        open_checkpoint(path)


@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_broken_header_raises_model_load_failed_only(
    tmp_path: Path, write_gguf: WriteGguf, data: st.DataObject
) -> None:
    path = tmp_path / "m.gguf"
    whole = bytearray(write_gguf(path).read_bytes())
    header = whole.index(b"blk.1.ffn_down.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, header))
        whole[at] = data.draw(st.integers(0, 255))
    path.write_bytes(whole[: data.draw(st.one_of(st.none(), st.integers(0, len(whole))))])
    with suppress(ModelLoadFailed):
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.load(name, torch.float32)
