"""GGUF files: any block type, dequantised a few rows at a time into the requested dtype."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.gguf_header import GgufHeader, read_gguf_header
from llorch_worker.model_files.model_file import CHUNK_ELEMENTS, Bytes, ModelFile
from llorch_worker.model_files.split_parts import split_parts
from llorch_worker.weights.checkpoint import (
    Checkpoint,
    StoredTensor,
    TakeRows,
    TensorInfo,
    in_order,
)
from llorch_worker.weights.groups import GroupForm, group_form
from llorch_worker.weights.rope_order import RopeOrder

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.([0-9]{1,5})\.(\w+)\.(weight|bias)")


class GgufCheckpoint(Checkpoint):
    """A .gguf file, or all parts of a split one, under canonical tensor names."""

    layout: Literal["gguf", "hugging_face"] = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        files = [ModelFile(part) for part in split_parts(path)]
        self.files = tuple(file.path for file in files)
        headers = [read_gguf_header(file) for file in files]
        self._check_parts(headers)
        kinds = frozenset(
            entry.name.split(".")[2]
            for header in headers
            for entry in header.entries
            if _LAYER_TENSOR.fullmatch(entry.name)
        )
        for file, header in zip(files, headers, strict=True):
            self._index(file, header, kinds)
        self._kinds = kinds
        self.metadata: Mapping[str, Any] = headers[0].metadata
        self._headers = [
            (file, header.data_start) for file, header in zip(files, headers, strict=True)
        ]
        total = self.metadata.get("split.tensors.count")
        if total is not None and total != len(self.tensors):
            raise ModelLoadFailed(
                f"{self.path}: its parts hold {len(self.tensors)} tensors, but {total} were split; "
                "take all parts from one download."
            )

    def _check_parts(self, headers: Sequence[GgufHeader]) -> None:
        """Raises ModelLoadFailed unless each file says that it is the part that its name says."""
        names = "restore the parts' names (…-00001-of-000NN.gguf) or merge them."
        for number, (file, header) in enumerate(zip(self.files, headers, strict=True)):
            count, at = (header.metadata.get(key) for key in ("split.count", "split.no"))
            if (count or 1) != len(headers):
                said = f"is one of {count} parts" if count else "is a whole model"
                raise ModelLoadFailed(f"{file} {said} but is not named like one; {names}")
            if count and at != number:
                raise ModelLoadFailed(f"{file} is part {at} of its model, counted from 0; {names}")

    def stored_name(self, name: str) -> str:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        stems = (
            [f"blk.{layer[1]}.{stem}" for stem in _LAYER_TENSOR_NAMES] if layer else _TENSOR_NAMES
        )
        kind = name.rpartition(".")[2]
        likely = (f"{stem}.{kind}" for stem in stems)
        return next((each for each in likely if canonical_name(each, self._kinds) == name), name)

    def require(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
        """See :meth:`Checkpoint.require`. A matrix of one row may be stored as a vector: ggml drops
        such dimensions when it writes a file again."""
        row = None if shape is None or shape[0] != 1 else shape[1:]
        as_stored = row if name in self.tensors and self.tensors[name].shape == row else shape
        return super().require(name, as_stored)

    def _index(self, file: ModelFile, header: GgufHeader, kinds: frozenset[str]) -> None:
        for entry in header.entries:
            name = canonical_name(entry.name, kinds)
            if name in self.tensors:
                raise ModelLoadFailed(
                    f"{file.path} has tensor {entry.name} twice; convert it again."
                )
            try:
                type_ = GGMLQuantizationType(entry.type_id)
            except ValueError as error:
                raise ModelLoadFailed(
                    f"{file.path}: tensor {entry.name} has the unknown block type {entry.type_id}; "
                    "update the gguf package or quantise the model to a common type such as Q8_0."
                ) from error
            if not can_dequantise(type_):
                raise ModelLoadFailed(
                    f"{file.path}: tensor {entry.name} has block type {type_.name}, which cannot "
                    "be dequantised; quantise the model to another type, such as Q8_0 or Q4_K."
                )
            block_elements, block_bytes = GGML_QUANT_SIZES[type_]
            if 0 in entry.shape or entry.shape[-1] % block_elements:
                raise ModelLoadFailed(
                    f"{file.path} is damaged (rows of tensor {entry.name} hold {entry.shape[-1]} "
                    f"values, not a multiple of {type_.name}'s {block_elements}); convert it again."
                )
            stored_bytes = math.prod(entry.shape) // block_elements * block_bytes
            start = header.data_start + entry.offset
            if start + stored_bytes > file.size_bytes:
                raise ModelLoadFailed(
                    f"{file.path} is truncated (tensor {entry.name} ends at byte "
                    f"{start + stored_bytes}, the file at {file.size_bytes}); download it again."
                )
            self.tensors[name] = StoredTensor(
                name, entry.shape, type_.name, stored_bytes, file, start
            )

    def read_into(self, name: str, out: torch.Tensor, order: RopeOrder | None = None) -> None:
        self.require(name, tuple(out.shape))
        type_ = GGMLQuantizationType[self.tensors[name].dtype_name]
        if out.ndim == 1 and order is not None:  # a bias is one row for the reader
            self.read_into(name, out)
            out.copy_(order.arrange(out))
            return
        out = out.view(-1, out.shape[-1])
        destination = None if order is None else order.destination(len(out))

        def take(first: int, piece: Bytes) -> None:
            values = _values(piece, type_).view(len(piece), -1).to(out.dtype)
            self.require_finite(name, values)
            if destination is None:
                out[first : first + len(values)].copy_(values)
            else:
                out.index_copy_(0, destination[first : first + len(values)], values)

        self._each_chunk(name, take)

    def described_by(self) -> Iterator[bytes]:
        for file, size in self._headers:
            yield file.read(0, size)

    def sample(self, name: str, at: int, length: int) -> bytes:
        return self.tensors[name].sample(at, length)

    def group_form(self, name: str) -> GroupForm | None:
        info = self.tensors.get(name)
        return None if info is None else group_form(GGMLQuantizationType[info.dtype_name])

    def each_piece(
        self, name: str, take: TakeRows, *, row_multiple: int, order: RopeOrder | None = None
    ) -> None:
        self._each_chunk(name, *in_order(take, row_multiple, order, self.tensors[name].shape[0]))

    def _each_chunk(
        self, name: str, take: Callable[[int, Bytes], None], row_multiple: int = 1
    ) -> None:
        info = self.tensors[name]
        row_elements = info.shape[-1]
        rows = math.prod(info.shape) // row_elements
        info.file.each_chunk(
            info.start,
            rows,
            info.stored_bytes // rows,
            max(1, CHUNK_ELEMENTS // row_elements // row_multiple) * row_multiple,
            take,
            torch.get_num_threads(),
        )


def canonical_name(gguf_name: str, kinds: frozenset[str]) -> str:
    """Hugging Face's name for a GGUF tensor; an unknown name stays as it is.

    ``kinds``: the kinds of tensors in the file's blocks. Two names depend on them.
    """
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match and match[2] in _LAYER_TENSOR_NAMES:
        name = _LAYER_TENSOR_NAMES[match[2]]
        if match[2] == "ffn_norm" and "post_ffw_norm" in kinds:
            name = "pre_feedforward_layernorm"
        elif match[2] == "ffn_up" and "attn_qkv" in kinds:
            name = "mlp.gate_up_proj"
        return f"model.layers.{int(match[1])}.{name}.{match[3]}"
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_TENSOR_NAMES[stem]}.{kind}" if stem in _TENSOR_NAMES else gguf_name


@cache
def can_dequantise(type_: GGMLQuantizationType) -> bool:
    """Whether tensors of this block type can be read."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[type_][1]), np.uint8), type_)
    except NotImplementedError:
        return False
    return True


_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def _values(piece: Bytes, type_: GGMLQuantizationType) -> torch.Tensor:
    """The values of ``piece``: [rows, row_bytes], in the same order, in new memory."""
    dtype = _FLOATS.get(type_)
    if dtype is not None:
        # A copy, because the chunk may not be aligned.
        return torch.from_numpy(np.array(piece).reshape(-1)).view(dtype)
    # As one long row, because gguf handles 16 rows at a time, even short ones.
    return torch.from_numpy(dequantize(piece.reshape(1, -1), type_))
