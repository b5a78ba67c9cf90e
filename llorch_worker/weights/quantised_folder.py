"""Quantised Hugging Face folders: AWQ, GPTQ and FP8, unpacked as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch

from llorch_worker.model_files.model_file import CHUNK_ELEMENTS
from llorch_worker.weights.checkpoint import Checkpoint, TakeRows, in_order
from llorch_worker.weights.groups import GroupForm
from llorch_worker.weights.hugging_face import HuggingFaceCheckpoint
from llorch_worker.weights.packed_weights import NibbleWeight, PackedWeight, packed_weights
from llorch_worker.weights.quantization_config import read_quantization_config
from llorch_worker.weights.rope_order import RopeOrder

_ACTIVATION_SCALES = (".input_scale", ".output_scale", ".activation_scale")
"""Activations stay unrounded."""


class QuantisedFolder(Checkpoint):
    """A folder whose packed matrices have the names and shapes that the graph knows."""

    layout: Literal["gguf", "hugging_face"] = "hugging_face"

    def __init__(self, folder: HuggingFaceCheckpoint, config: object) -> None:
        """``config``: its ``quantization_config``. Raises ModelLoadFailed if it is unknown."""
        self.path, self.files, self.metadata = folder.path, folder.files, folder.metadata
        self._folder = folder
        self._packed = packed_weights(folder, read_quantization_config(folder.path, config))
        parts = {part.name for weight in self._packed.values() for part in weight.tensors}
        self.tensors = {name: info for name, info in folder.tensors.items() if name not in parts}
        self.tensors |= {name: weight.info for name, weight in self._packed.items()}

    def read_into(self, name: str, out: torch.Tensor, order: RopeOrder | None = None) -> None:
        weight = self._packed.get(name)
        if weight is None:
            self._folder.read_into(name, out, order)
            return
        self.require(name, tuple(out.shape))
        values = weight.values()

        def take(first: int, end: int) -> None:
            with torch.inference_mode(out.is_inference()):  # which holds for a thread
                self.require_finite(name, out[first:end].copy_(values(first, end)))

        _each_piece(weight, take, weight.row_multiple)
        if order is not None:
            out.copy_(order.arrange(out))

    def group_form(self, name: str) -> GroupForm | None:
        weight = self._packed.get(name)
        return None if weight is None else weight.form

    def each_piece(
        self, name: str, take: TakeRows, *, row_multiple: int, order: RopeOrder | None = None
    ) -> None:
        weight = self._packed[name]
        assert isinstance(weight, NibbleWeight)
        blocks = weight.blocks()
        take_piece, row_multiple = in_order(take, row_multiple, order, weight.info.shape[0])
        _each_piece(
            weight,
            lambda first, end: take_piece(first, blocks(first, end)),
            math.lcm(row_multiple, weight.row_multiple),
        )

    def adds_nothing(self, name: str) -> bool:
        """True for scales of activations, and for the zero biases that AutoGPTQ adds."""
        stem, _, kind = name.rpartition(".")
        if kind == "bias" and f"{stem}.weight" in self._packed:
            return not self._folder.load(name, torch.float32).any()
        return name.endswith(_ACTIVATION_SCALES)

    def described_by(self) -> Iterator[bytes]:
        return self._folder.described_by()

    def sample(self, name: str, at: int, length: int) -> bytes:
        weight = self._packed.get(name)
        if weight is None:
            return self._folder.sample(name, at, length)
        found = b""
        for part in weight.tensors:  # one after the other
            if at < part.stored_bytes and len(found) < length:
                found += self._folder.sample(part.name, at, length - len(found))
            at = max(0, at - part.stored_bytes)
        return found

    def repeats(self, name: str, other: str) -> bool:
        packed = name in self._packed or other in self._packed
        return not packed and self._folder.repeats(name, other)


def _each_piece(weight: PackedWeight, take: Callable[[int, int], None], row_multiple: int) -> None:
    """Call ``take`` with the first row and the end of each piece, from several threads."""
    rows, columns = weight.info.shape
    step = max(1, CHUNK_ELEMENTS // columns // row_multiple) * row_multiple
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        # list() raises the errors of the threads.
        list(pool.map(lambda first: take(first, min(first + step, rows)), range(0, rows, step)))
