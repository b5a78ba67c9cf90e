"""Random matrices made on the device, dense or as codes and scales of a GGUF block type."""

from __future__ import annotations

from itertools import groupby

import torch
from gguf import GGMLQuantizationType as BlockType

from llorch_worker.kernels import quantised_matrix
from llorch_worker.kernels.quantised_matrix import QuantisedMatrix
from llorch_worker.weights import DenseLinear, Linear
from llorch_worker.weights.groups import GroupForm, group_form
from llorch_worker.weights.quantised_linear import Multiply, QuantisedLinear

DENSE = "bf16"
MIXTURE = "q4_k_m"
TYPES = {type_.name.lower(): type_ for type_ in BlockType if group_form(type_) is not None}
NAMES = (DENSE, MIXTURE, *TYPES)
"""The types that ``RandomWeights`` can make."""

Part = tuple[str, int]
"""A tensor of a checkpoint: its name in a layer (``v``, ``down``) and its rows."""


class RandomWeights:
    """Draws the matrices of one model, with a spread that keeps activations near one;
    ``total_bytes`` counts what was drawn."""

    def __init__(
        self, kind: str, num_layers: int, *, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        """``kind``: one of ``NAMES``; ``dtype``: that of dense matrices and of activations."""
        self._kind = kind
        self._num_layers = num_layers
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._multiply = _multiply_on(device)
        self.total_bytes = 0

    def dense(self, rows: int, columns: int) -> torch.Tensor:
        """A matrix [rows, columns] that is never quantised."""
        weight = torch.empty(rows, columns, dtype=self._dtype, device=self._device)
        self.total_bytes += weight.nbytes
        return weight.normal_(std=columns**-0.5, generator=self._generator)

    def linear(self, columns: int, *parts: Part, layer: int = 0) -> Linear:
        """A layer whose matrix consists of ``parts``, stacked as by the loader."""
        if self._kind == DENSE:
            return DenseLinear(self.dense(sum(rows for _, rows in parts), columns))
        pieces = tuple(
            self._quantised(type_, sum(rows for _, rows in alike), columns)
            for type_, alike in groupby(parts, lambda part: self._type(part[0], layer))
        )
        self.total_bytes += sum(piece.nbytes for piece in pieces)
        return QuantisedLinear(pieces, self._multiply)

    def _type(self, name: str, layer: int) -> BlockType:
        if self._kind != MIXTURE:
            return TYPES[self._kind]
        wide = name == "logits" or (name in ("v", "down") and self._has_more_bits(layer))
        return BlockType.Q6_K if wide else BlockType.Q4_K

    def _has_more_bits(self, layer: int) -> bool:
        """llama.cpp's rule for Q4_K_M (``use_more_bits`` in its ``llama-quant.cpp``)."""
        eighth = self._num_layers // 8
        return layer < eighth or layer >= 7 * self._num_layers // 8 or (layer - eighth) % 3 == 2

    def _quantised(self, type_: BlockType, rows: int, columns: int) -> QuantisedMatrix:
        form = group_form(type_)
        assert form is not None
        levels = 2**form.code_bits
        codes = torch.randint(
            levels,
            (rows, columns),
            dtype=torch.uint8,
            device=self._device,
            generator=self._generator,
        )
        scales, offsets = self._scales(form, rows, columns)
        return QuantisedMatrix.pack(
            codes,
            scales,
            offsets,
            bits=max(4, form.code_bits),
            zero=form.zero,
            factor=form.half_factor,
        )

    def _scales(
        self, form: GroupForm, rows: int, columns: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and offsets, [rows, groups] float32 each. Weights have mean 0 (half a scale if the
        type has no offsets) and a standard deviation of about ``columns ** -0.5``."""
        levels = 2**form.code_bits
        step = (12 / (columns * (levels**2 - 1))) ** 0.5
        scales = torch.empty(rows, columns // form.group, device=self._device)
        scales.uniform_(0.75 * step, 1.25 * step, generator=self._generator)
        if not form.has_offsets:
            return scales, None
        return scales, scales * (form.zero - (levels - 1) / 2)


def _multiply_on(device: torch.device) -> Multiply:
    if device.type == "cuda":
        # Imported here: it reads the environment when imported, and only CUDA needs it.
        from llorch_worker.kernels.triton.quantised_linear import quantised_linear

        return quantised_linear
    return quantised_matrix.quantised_linear
