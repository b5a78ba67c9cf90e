"""Matrices that a folder keeps quantised in several tensors: AWQ and GPTQ of 4 bits, FP8.

Layouts as AutoAWQ (``WQLinear_GEMM``), GPTQModel and compressed-tensors write them. A weight of
4 bits is ``scale * (code - zero)``, all three for a row and a group of columns. The difference is a
whole number from -15 to 15, so Q5_0 holds it exactly, and Q4_0 does if all zeros are 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.model_file import Bytes
from llorch_worker.weights.checkpoint import TensorInfo
from llorch_worker.weights.groups import GroupForm, group_form
from llorch_worker.weights.hugging_face import HuggingFaceCheckpoint
from llorch_worker.weights.quantization_config import QuantizationConfig

_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ's place of each of eight codes in a word; GPTQ keeps them in order."""
_BLOCK = 32
"""Columns of a block of Q4_0 and Q5_0."""
MOST_SHARED_COLUMNS: Final = 128
"""Of a scale in the kernels."""
_ONE_EACH: Final = np.uint32(0x11111111)
FP8: Final = "F8_E4M3"


@dataclass(frozen=True)
class NibbleWeight:
    """A matrix of AWQ or GPTQ, which both keep transposed."""

    folder: HuggingFaceCheckpoint
    info: TensorInfo
    tensors: tuple[TensorInfo, ...]
    """Codes, zeros, scales and, in GPTQ, the group of each column."""
    config: QuantizationConfig

    @property
    def row_multiple(self) -> int:
        """Pieces begin at a multiple of this row."""
        return 8 if self.config.method == "awq" else 1

    @property
    def _places(self) -> tuple[int, ...] | None:
        return _AWQ_PLACES if self.config.method == "awq" else None

    @cached_property
    def form(self) -> GroupForm | None:
        """The blocks that hold it exactly; None if none does. Reads zeros and groups, no codes."""
        columns = self.info.shape[1]
        if columns % _BLOCK or self._group % _BLOCK or self.tensors[2].dtype_name != "F16":
            return None
        if not np.array_equal(self._group_of, np.arange(columns) // self._group):
            return None
        types = GGMLQuantizationType
        form = group_form(types.Q4_0 if (self._zeros == 8).all() else types.Q5_0)
        assert form is not None
        shared = math.gcd(self._group, columns, MOST_SHARED_COLUMNS) // _BLOCK
        return replace(form, shared=shared)

    @property
    def _group(self) -> int:
        columns = self.info.shape[1]
        return columns if self.config.group == -1 else min(self.config.group, columns)

    @property
    def _group_of(self) -> npt.NDArray[np.int64]:
        """[columns]"""
        if len(self.tensors) == 3:
            return np.arange(self.info.shape[1]) // self._group
        group_of = _numbers(self.folder, self.tensors[3], np.int32).astype(np.int64)
        if group_of.size and not 0 <= group_of.min() <= group_of.max() < self.tensors[2].shape[0]:
            raise self.folder.out_of_range(self.tensors[3].name)
        return group_of

    @property
    def _zeros(self) -> Bytes:
        """[rows, groups]"""
        info, config = self.tensors[1], self.config
        words = _numbers(self.folder, info, np.uint32)
        stored = _nibbles(words, self._places)[:, : self.info.shape[0]].T
        # GPTQModel 5 stores 8 under the name of the first format, which stored 7. Kernels for
        # symmetric weights read neither.
        if config.symmetric is not False and ((stored == 7).all() or (stored == 8).all()):
            return np.full(stored.shape, 8, np.uint8)
        if config.symmetric:
            raise _unusable(self.folder, info, "sym is true and its zero points are not all 7 or 8")
        # Whole words, as GPTQModel lowers them: a zero of 0 borrows from its neighbour.
        words = words + _ONE_EACH if config.lowered_zeros else words
        return np.ascontiguousarray(_nibbles(words, self._places).T)

    @property
    def _scales(self) -> npt.NDArray[np.float32]:
        """[rows, groups]"""
        name = self.tensors[2].name
        return np.ascontiguousarray(self.folder.load(name, torch.float32).numpy().T)

    def _codes(self) -> Callable[[int, int], Bytes]:
        """Gives [rows, columns]."""
        stored = torch.from_numpy(_numbers(self.folder, self.tensors[0], np.int32))
        words = stored.t().contiguous().numpy()  # so that rows lie together
        del stored

        def rows(first: int, end: int) -> Bytes:
            if self._places is None:
                return _nibbles(words[first:end], None)
            eights = _nibbles(words[first // 8 : end // 8], self._places)
            eights = eights.reshape(-1, self.info.shape[1], 8).transpose(0, 2, 1)
            return eights.reshape(end - first, -1)

        return rows

    def values(self) -> Callable[[int, int], torch.Tensor]:
        """Reads what is packed. The result gives rows ``[first, end)`` in float32."""
        codes, group_of = self._codes(), self._group_of
        zeros, scales = self._zeros, self._scales

        def rows(first: int, end: int) -> torch.Tensor:
            values = codes(first, end).astype(np.float32)
            values -= zeros[first:end].take(group_of, axis=1)
            values *= scales[first:end].take(group_of, axis=1)
            return torch.from_numpy(values)

        return rows

    def blocks(self) -> Callable[[int, int], Bytes]:
        """The same for raw blocks of ``form``: [rows, row bytes]."""
        form = self.form
        assert form is not None
        codes, zeros, group_of = self._codes(), self._zeros, self._group_of
        scales = self._scales.astype(np.float16).view(np.uint8).reshape(len(zeros), -1, 2)
        block_bytes, of_block = GGML_QUANT_SIZES[form.type][1], group_of[::_BLOCK]

        def rows(first: int, end: int) -> Bytes:
            raised = np.uint8(form.zero) - zeros[first:end].take(group_of, axis=1)
            raised += codes(first, end)
            halves = raised.reshape(end - first, -1, 2, _BLOCK // 2)
            out = np.empty((*halves.shape[:2], block_bytes), np.uint8)
            out[..., :2] = scales[first:end].take(of_block, axis=1)
            out[..., -16:] = (halves[:, :, 0] & 15) | (halves[:, :, 1] << 4)
            if form.code_bits == 5:
                fifth = (halves >> 4).reshape(end - first, -1, _BLOCK)
                out[..., 2:6] = np.packbits(fifth, axis=-1, bitorder="little")
            return out.reshape(end - first, -1)

        return rows


@dataclass(frozen=True)
class Fp8Weight:
    """A matrix of FP8 with a scale for the tensor, each row, or each block."""

    folder: HuggingFaceCheckpoint
    info: TensorInfo
    scale: TensorInfo
    block: tuple[int, int]
    row_multiple: int = 1
    form: None = None

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return (self.info, self.scale)

    def values(self) -> Callable[[int, int], torch.Tensor]:
        """See ``NibbleWeight``."""
        columns, (high, wide) = self.info.shape[1], self.block
        scale = self.folder.load(self.scale.name, torch.float32)
        scale = scale if scale.ndim == 2 else scale.view(-1, 1)

        def rows(first: int, end: int) -> torch.Tensor:
            codes = torch.from_numpy(self.folder.stored_rows(self.info.name, first, end))
            by = scale[torch.arange(first, end) // high].repeat_interleave(wide, dim=1)
            return codes.view(torch.float8_e4m3fn).float() * by[:, :columns]

        return rows


PackedWeight = NibbleWeight | Fp8Weight


def packed_weights(
    folder: HuggingFaceCheckpoint, config: QuantizationConfig
) -> dict[str, PackedWeight]:
    """The quantised matrices of a folder, under the names that the graph has for them.

    Raises ModelLoadFailed, with the tensor's name, if one is missing or of another shape or type.
    """
    if config.method in ("awq", "gptq"):
        suffixes = (".qweight", ".qzeros", ".scales")
        stems = {name.rpartition(".")[0] for name in folder.tensors if name.endswith(suffixes)}
        return {f"{stem}.weight": _nibble_weight(folder, config, stem) for stem in sorted(stems)}
    return {
        name: _fp8_weight(folder, config, name)
        for name, info in folder.tensors.items()
        if info.dtype_name == FP8
    }


def _nibble_weight(
    folder: HuggingFaceCheckpoint, config: QuantizationConfig, stem: str
) -> NibbleWeight:
    codes = _matrix(folder, f"{stem}.qweight")
    columns, rows = codes.shape
    if config.method == "awq":
        rows *= 8
    else:
        columns *= 8
    groups = 1 if config.group == -1 else -(-columns // config.group)
    words = [codes, folder.require(f"{stem}.qzeros", (groups, -(-rows // 8)))]
    scales = folder.require(f"{stem}.scales", (groups, rows))
    group_of = f"{stem}.g_idx"
    if config.reordered or (config.method == "gptq" and group_of in folder.tensors):
        words.append(folder.require(group_of, (columns,)))
    for info in words:
        if info.dtype_name != "I32":
            raise _unusable(folder, info, f"{config.method} has I32")
    tensors = (*words[:2], scales, *words[2:])
    stored_bytes = sum(info.stored_bytes for info in tensors)
    info = TensorInfo(f"{stem}.weight", (rows, columns), config.method.upper(), stored_bytes)
    return NibbleWeight(folder, info, tensors, config)


def _fp8_weight(folder: HuggingFaceCheckpoint, config: QuantizationConfig, name: str) -> Fp8Weight:
    info = _matrix(folder, name)
    inverse = f"{name}_scale_inv"  # the same number under another name
    scale = folder.require(inverse if inverse in folder.tensors else f"{name}_scale")
    for block in config.blocks:
        high, wide = (
            size if each == -1 else min(each, size)
            for size, each in zip(info.shape, block, strict=True)
        )
        counts = -(-info.shape[0] // high), -(-info.shape[1] // wide)
        # A column of scales, or a single one, may come with fewer dimensions.
        whole = math.prod(counts) == math.prod(scale.shape)
        if whole and scale.shape == counts[: len(scale.shape)]:
            return Fp8Weight(folder, info, scale, (high, wide))
    raise _unusable(folder, scale, f"{name} is {list(info.shape)}")


def _matrix(folder: HuggingFaceCheckpoint, name: str) -> TensorInfo:
    info = folder.require(name)
    if len(info.shape) != 2:
        raise _unusable(folder, info, "matrices have two dimensions")
    return info


def _unusable(folder: HuggingFaceCheckpoint, info: TensorInfo, but: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{folder.path}: tensor {info.name} is {info.dtype_name} {list(info.shape)}, but {but}; "
        "download or quantise the model again."
    )


def _numbers(
    folder: HuggingFaceCheckpoint, info: TensorInfo, dtype: type[np.generic]
) -> npt.NDArray[Any]:
    return folder.stored_rows(info.name, 0, info.shape[0]).view(dtype).reshape(info.shape)


def _nibbles(words: npt.NDArray[np.uint32], places: tuple[int, ...] | None) -> Bytes:
    """[n, words] to [n, 8 * words]"""
    packed = np.ascontiguousarray(words).view(np.uint8)
    out = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1, 8)
    return (out if places is None else out[..., places]).reshape(len(packed), -1)
