"""How a device keeps the model's matrices: the one place that decides it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

from llorch_worker.kernels import native_kernels_load
from llorch_worker.settings import KernelChoice
from llorch_worker.weights.checkpoint import Checkpoint
from llorch_worker.weights.fused_weight import FusedWeight, Part
from llorch_worker.weights.linear import DenseLinear, Linear


class Linears(Protocol):
    """Makes the linear layers of one device and dtype, and foretells their size."""

    @property
    def name(self) -> str:
        """For logs and reports."""

    @property
    def keeps_rows(self) -> bool:
        """Whether a layer holds the plain [out, in] matrix, which a tied embedding can share."""

    def weight_bytes(self, checkpoint: Checkpoint, weight: FusedWeight) -> int:
        """What ``load`` will keep, to the byte; reads no weights."""

    def quantised_parts(self, checkpoint: Checkpoint, weight: FusedWeight) -> tuple[Part, ...]:
        """Those that ``load`` will keep in the codes and scales of the file."""

    def load(self, checkpoint: Checkpoint, weight: FusedWeight) -> Linear:
        """Read the weight. Raises ModelLoadFailed where the file does not hold it."""


@dataclass(frozen=True)
class DenseLinears:
    """Matrices in the compute dtype, for torch's own products. Any device."""

    device: torch.device
    dtype: torch.dtype
    name: str = "torch"
    keeps_rows: bool = True

    def weight_bytes(self, checkpoint: Checkpoint, weight: FusedWeight) -> int:  # noqa: ARG002
        """See ``Linears``."""
        return weight.elements * self.dtype.itemsize

    def quantised_parts(self, checkpoint: Checkpoint, weight: FusedWeight) -> tuple[Part, ...]:  # noqa: ARG002
        """See ``Linears``."""
        return ()

    def load(self, checkpoint: Checkpoint, weight: FusedWeight) -> Linear:
        """See ``Linears``."""
        return DenseLinear(weight.load(checkpoint, self.dtype).to(self.device))


def select_linears(
    device: torch.device, dtype: torch.dtype, kernels: KernelChoice = "auto"
) -> Linears:
    """How matrices are kept for activations of ``dtype`` on ``device``.

    float32 is the exact reference: whatever the file holds is dequantised for it.
    """
    if kernels == "auto" and device.type == "cpu" and dtype is torch.bfloat16:
        if not native_kernels_load():
            return DenseLinears(device, dtype)  # select_ops logs the reason
        from llorch_worker.weights.native_linear import NativeLinears

        return NativeLinears()
    if kernels == "auto" and device.type == "cuda" and dtype is not torch.float32:
        if find_spec("triton") is None:
            return DenseLinears(device, dtype)  # select_ops says that it is missing
        from llorch_worker.kernels.triton.quantised_linear import quantised_linear
        from llorch_worker.weights.quantised_linear import QuantisedLinears

        return QuantisedLinears(device, dtype, quantised_linear)
    return DenseLinears(device, dtype)
