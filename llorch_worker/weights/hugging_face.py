"""Hugging Face folders: config.json and safetensors files, single or sharded.

This module reads the safetensors header itself: the library keeps every page it touched resident
until the file is closed, which would double the memory of a load.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.bounds import SAFETENSORS_HEADER_BYTES, TENSORS, require
from llorch_worker.model_files.model_file import CHUNK_ELEMENTS, Bytes, ModelFile
from llorch_worker.model_files.side_file import exists, parse_object, read_bytes, read_object
from llorch_worker.weights.checkpoint import Checkpoint, StoredTensor
from llorch_worker.weights.rope_order import RopeOrder

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PACKED = {"I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_INSIDE, _BARE = "model.", "embed_tokens.weight"
"""What a model with a head puts before the names of its decoder's tensors, and one of these."""
_OLD_NORMS = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""What models converted from TensorFlow call a norm's parts, as transformers takes them."""
_DESCRIPTIONS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
    "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
"""What a folder holds besides the weights and templates with a name."""
_RULES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
"""What sentence-transformers says of how vectors are made, besides its modules' own files."""
_SIDE_FILES = ("generation_config", "tokenizer_config")


class HuggingFaceCheckpoint(Checkpoint):
    """A folder as ``save_pretrained`` writes it."""

    layout: Literal["gguf", "hugging_face"] = "hugging_face"

    def __init__(self, path: Path) -> None:
        self.path = path
        weight_map = _weight_map(path)
        names = sorted(set(weight_map.values())) if weight_map else [_SINGLE]
        self.files = tuple(path / name for name in names)
        if not exists(path / "config.json"):
            raise ModelLoadFailed(
                f"{path} has no config.json; "
                "give a folder as transformers' save_pretrained writes it."
            )
        metadata = read_object(path / "config.json")
        for name in _SIDE_FILES:
            if exists(path / f"{name}.json"):
                metadata[name] = read_object(path / f"{name}.json")
        self.metadata: Mapping[str, Any] = metadata
        self.tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            self._index(ModelFile(file), weight_map)
        for name, file_name in weight_map.items():
            if name not in self.tensors:
                raise ModelLoadFailed(
                    f"{path / file_name} lacks tensor {name}, which {_INDEX} says it holds; "
                    "download the model again."
                )
        self._old_names: dict[str, str] = {}
        for old in tuple(self.tensors):
            head, norm, kind = old.rpartition(".LayerNorm")
            name = head + _OLD_NORMS.get(norm + kind, norm + kind)
            if name not in self.tensors:
                self._old_names[name] = old
                self.tensors[name] = replace(self.tensors.pop(old), name=name)
        # Saved without a head, as folders of sentence-transformers are.
        self._is_bare = _BARE in self.tensors
        if self._is_bare:
            named = [replace(each, name=_INSIDE + each.name) for each in self.tensors.values()]
            self.tensors = {each.name: each for each in named}

    def stored_name(self, name: str) -> str:
        name = name.removeprefix(_INSIDE) if self._is_bare else name
        return self._old_names.get(name, name)

    def _index(self, file: ModelFile, weight_map: Mapping[str, str]) -> None:
        """``weight_map``: the file of each tensor, for those that files of one model share."""
        header_bytes = int.from_bytes(file.read(0, 8), "little")
        if not 2 <= header_bytes <= file.size_bytes - 8:
            raise _damaged(file, f"its header announces {header_bytes} bytes")
        require(file.path, "the size of its header", header_bytes, SAFETENSORS_HEADER_BYTES)
        try:
            text = file.read(8, header_bytes).decode()
            header = parse_object(text)
        except UnicodeDecodeError as error:
            raise _damaged(file, "its header is not UTF-8") from error
        except ValueError as error:
            raise _damaged(file, f"its header {error}") from error
        require(file.path, "the number of tensors", len(header), TENSORS)
        if text.count('"data_offsets"') > len(header) - ("__metadata__" in header):
            raise _damaged(file, "its header has a tensor twice")
        for name, entry in header.items():
            # A shard may hold another version of a tensor, which was replaced in a later one.
            if name == "__metadata__" or weight_map.get(name, file.path.name) != file.path.name:
                continue
            if name in self.tensors:
                raise ModelLoadFailed(
                    f"{file.path} has tensor {name}, and so has {self.tensors[name].file.path.name}"
                    f"; name one of them in {_INDEX}."
                )
            try:
                shape = tuple(int(size) for size in entry["shape"])
                begin, end = (int(offset) for offset in entry["data_offsets"])
                dtype_name = str(entry["dtype"])
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise _damaged(file, f"its entry for tensor {name} is malformed") from error
            start = 8 + header_bytes + begin
            if begin < 0 or end < begin or 8 + header_bytes + end > file.size_bytes:
                raise _damaged(file, f"tensor {name} runs past the end of the file")
            dtype = (_DTYPES | _PACKED).get(dtype_name)
            if dtype is not None and end - begin != math.prod(shape) * dtype.itemsize:
                raise _damaged(file, f"tensor {name} does not have the bytes of its shape")
            self.tensors[name] = StoredTensor(name, shape, dtype_name, end - begin, file, start)

    def read_into(self, name: str, out: torch.Tensor, order: RopeOrder | None = None) -> None:
        self.require(name, tuple(out.shape))
        info = self.tensors[name]
        if info.dtype_name not in _DTYPES:
            raise ModelLoadFailed(
                f"{self.path}: tensor {name} is stored as {info.dtype_name}, but only "
                f"{', '.join(_DTYPES)} can be read; use an unquantised copy of the model."
            )
        dtype = _DTYPES[info.dtype_name]
        flat = out.view(-1)

        def take(first: int, piece: Bytes) -> None:
            values = torch.from_numpy(np.array(piece).reshape(-1)).view(dtype)
            written = flat[first : first + len(values)].copy_(values)
            self.require_finite(name, written)

        info.file.each_chunk(
            info.start,
            flat.numel(),
            dtype.itemsize,
            CHUNK_ELEMENTS,
            take,
            torch.get_num_threads(),
        )
        if order is not None:
            out.copy_(order.arrange(out))

    def stored_rows(self, name: str, first: int, end: int) -> Bytes:
        """Rows ``[first, end)`` of a tensor as they are stored: [rows, row bytes]."""
        info = self.tensors[name]
        out = np.empty((end - first, info.stored_bytes // info.shape[0]), np.uint8)
        info.file.fill(out.reshape(-1), info.start + first * out.shape[1])
        return out

    def described_by(self) -> Iterator[bytes]:
        for name in _DESCRIPTIONS:
            path = self.path / name
            yield read_bytes(path) if exists(path) else b""
        for path in sorted((self.path / "additional_chat_templates").glob("*.jinja")):
            yield path.name.encode()
            yield read_bytes(path)
        rules = [self.path / name for name in _RULES if exists(self.path / name)]
        for path in sorted((*rules, *self.path.glob("[0-9]_*/config.json"))):
            yield path.relative_to(self.path).as_posix().encode()
            yield read_bytes(path)

    def sample(self, name: str, at: int, length: int) -> bytes:
        return self.tensors[name].sample(at, length)

    def repeats(self, name: str, other: str) -> bool:
        first, second = self.tensors[name], self.tensors[other]
        if (first.shape, first.dtype_name) != (second.shape, second.dtype_name):
            return False
        differences: list[int] = []

        def take(at: int, piece: Bytes) -> None:
            if second.file.read(second.start + at, piece.size) != piece.tobytes():
                differences.append(at)

        first.file.each_chunk(first.start, first.stored_bytes, 1, 1 << 20, take)
        return not differences


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, as the index has it; empty if all are in one file."""
    if exists(path / _INDEX):
        weight_map = read_object(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadFailed(f"{path / _INDEX} has no weight_map; download the model again.")
        weight_map = {name: str(file) for name, file in weight_map.items()}
        for name in sorted({*weight_map.values()}):
            # The index must not name files outside the folder.
            if Path(name).name != name or not exists(path / name):
                raise ModelLoadFailed(
                    f"{path} lacks {name}, which is in its index; download the model again."
                )
        if exists(path / _SINGLE) and _SINGLE not in weight_map.values():
            raise ModelLoadFailed(
                f"{path} holds both {_SINGLE} and {_INDEX}, which does not name it; "
                "remove the one that is not meant."
            )
        return weight_map
    if exists(path / _SINGLE):
        return {}
    found = {file.suffix for file in path.iterdir()}
    if ".gguf" in found:
        raise ModelLoadFailed(
            f"{path} is a folder that holds GGUF files; give the path of one of them."
        )
    if found & {".bin", ".pt", ".pth"}:
        raise ModelLoadFailed(
            f"{path} holds its weights as pickles only, which can run code when opened; convert "
            "them to safetensors with transformers' save_pretrained."
        )
    raise ModelLoadFailed(
        f"{path} holds no weights (neither {_SINGLE} nor {_INDEX}); "
        "give a .gguf file or a complete Hugging Face model folder."
    )


def _damaged(file: ModelFile, what: str) -> ModelLoadFailed:
    return ModelLoadFailed(f"{file.path} is truncated or damaged ({what}); download it again.")
