"""The quantised types that weights keep, and the bits that each weight then takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llorch_worker.model import ModelConfig, quantised_types
from llorch_worker.weights import Checkpoint, FusedWeight, Linears, Part


@dataclass(frozen=True)
class KeptType:
    """A block type that weights keep. The codes are the file's, in another layout."""

    name: str
    stored_bits: float
    kept_bits: float
    """Bits per weight, including its share of scales and offsets, in the file and in memory."""

    def __str__(self) -> str:
        """``Q8_0``, or ``Q6_K in 9 bits`` if its size in memory differs from that in the file."""
        alike = self.kept_bits == self.stored_bits
        return self.name if alike else f"{self.name} in {self.kept_bits:g} bits"


def kept_types(config: ModelConfig, checkpoint: Checkpoint, linears: Linears) -> Iterator[KeptType]:
    """The types that ``linears`` keeps, those with most weights first."""
    for name in quantised_types(config, checkpoint, linears):
        of_type = (
            FusedWeight((Part(tensor, info.shape),))
            for tensor, info in checkpoint.tensors.items()
            if info.dtype_name == name
        )
        kept = (each for each in of_type if linears.quantised_parts(checkpoint, each))
        # Rows are rounded up to whole tiles, which matters least in the largest tensor.
        largest = max(kept, key=lambda each: each.elements)
        stored_bytes = checkpoint.tensors[largest.parts[0].name].stored_bytes
        yield KeptType(
            name=name,
            stored_bits=round(8 * stored_bytes / largest.elements, 2),
            kept_bits=round(8 * linears.weight_bytes(checkpoint, largest) / largest.elements, 2),
        )
