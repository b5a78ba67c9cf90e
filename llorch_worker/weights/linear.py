"""Linear layers: the interfaces, and the dense layer that runs on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from llorch_worker.weights.checkpoint import Checkpoint
from llorch_worker.weights.fused_weight import FusedWeight

DenseProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``x: [tokens, in]``, ``weight: [out, in]`` to ``x @ weight.T``."""


class Linear(Protocol):
    """``[tokens, in] -> [tokens, out]``; the result is float32 if ``wide``.

    Logits are computed wide: bfloat16 steps by 1/8 at 16, which would create ties.
    """

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor: ...


class Linears(Protocol):
    """Loads the linear layers of one device and dtype, and predicts their size."""

    @property
    def name(self) -> str:
        """For logs and reports."""

    @property
    def shared(self) -> Callable[[torch.Tensor], Linear] | None:
        """Makes a layer of a tied embedding's [out, in]; None if layers hold other forms."""

    @property
    def keeps_quantised(self) -> bool:
        """Whether ``load`` keeps those parts quantised that the file stores so."""

    @property
    def embedding_as_stored(self) -> bool:
        """Whether a large quantised embedding keeps the file's blocks; see ``load_embedding``."""

    def weight_bytes(self, checkpoint: Checkpoint, weight: FusedWeight) -> int:
        """The exact bytes that ``load`` will keep; reads no weights."""

    def load(self, checkpoint: Checkpoint, weight: FusedWeight) -> Linear:
        """Read the weight. Raises ModelLoadFailed if the file does not hold it."""


class DenseLinear:
    """A matrix in the compute dtype; ``weight: [out, in]``."""

    def __init__(self, weight: torch.Tensor, product: DenseProduct = F.linear) -> None:
        self.weight = weight
        self._product = product

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        """See ``Linear``; torch rounds the product to ``x``'s dtype before it is widened."""
        out = self._product(x, self.weight)
        return out.float() if wide else out


@dataclass(frozen=True)
class DenseLinears:
    """Keeps matrices in the compute dtype, on any device; see ``Linears``."""

    device: torch.device
    dtype: torch.dtype
    product: DenseProduct = F.linear
    name: str = "torch"
    keeps_quantised: bool = False
    embedding_as_stored: bool = False

    def weight_bytes(self, checkpoint: Checkpoint, weight: FusedWeight) -> int:  # noqa: ARG002
        return weight.elements * self.dtype.itemsize

    def load(self, checkpoint: Checkpoint, weight: FusedWeight) -> Linear:
        return self.shared(weight.load(checkpoint, self.dtype).to(self.device))

    def shared(self, weight: torch.Tensor) -> Linear:
        return DenseLinear(weight, self.product)
