"""Which implementation of the operations a model gets."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, Protocol

import torch

from llorch_worker.kernels import torch_ops
from llorch_worker.kernels.interface import FusedSample, Ops
from llorch_worker.kernels.layer_kv import KvForm
from llorch_worker.kernels.torch_ops import TorchOps

KernelChoice = Literal["auto", "torch"]
"""``auto``: the fastest that the device, the dtype and this machine allow; ``torch``: plain."""

FP8_CAPABILITY = (8, 9)
"""Ada and later convert float8 e4m3; Triton compiles it for no card before."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChosenOps:
    """Operations, and why these."""

    ops: Ops
    reason: str


class CutRows(Protocol):
    """min_p, top_k and top_p of many rows at once, on the CPU."""

    def __call__(
        self,
        weights: torch.Tensor,
        scaled: torch.Tensor,
        rows: torch.Tensor | None,
        log_min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
    ) -> None:
        """Sets the weights of the tokens that fall to 0; a row whose first is NaN stays as it is.

        Args:
            weights: [any, vocab] float32, the probabilities before any cut; changed in place.
            scaled: [any, vocab] float32, logits over temperature.
            rows: [cut] int64, which ones; None for all.
            log_min_p: [cut] float32, -inf where off.
            top_k: [cut] int64, the vocabulary's size where off.
            top_p: [cut] float64, inf where off.
        """


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice = "auto",
    *,
    head_dim: int,
    kv_form: KvForm = "exact",
) -> Ops:
    """The operations for a model in ``dtype`` on ``device``; logs which they are, and why."""
    chosen = choose_ops(device, dtype, kernels, head_dim=head_dim, kv_form=kv_form)
    _log.info("kernels: %s for %s on %s: %s", chosen.ops.name, dtype, device, chosen.reason)
    return chosen.ops


def choose_ops(
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice = "auto",
    *,
    head_dim: int,
    kv_form: KvForm = "exact",
) -> ChosenOps:
    """As ``select_ops``, in silence. The first call on a machine may compile."""
    if kernels == "torch":
        return ChosenOps(TorchOps(), "asked for")
    if device.type == "cuda":
        return _for_cuda(device, kv_form)
    if device.type == "cpu":
        return _for_cpu(dtype, head_dim, kv_form)
    return ChosenOps(TorchOps(), f"there are no others for {device.type}")


def select_sample(device: torch.device, kernels: KernelChoice = "auto") -> FusedSample | None:
    """What samples on ``device`` without a word from the host; None where the host computes."""
    if device.type != "cuda":
        return None
    if kernels == "torch" or find_spec("triton") is None:
        return torch_ops.sample
    from llorch_worker.kernels.triton.sample import sample  # not at the top: see _for_cuda

    return sample


def select_cut_rows(
    device: torch.device, dtype: torch.dtype, kernels: KernelChoice = "auto"
) -> CutRows | None:
    """What cuts beside a model in ``dtype`` on ``device``; None where nothing does it faster than
    the engine's own operations, or only after a compiler had run for it alone."""
    if device.type != "cpu" or dtype is not torch.bfloat16 or kernels == "torch":
        return None
    from llorch_worker.kernels.native.compiler import NativeUnavailable
    from llorch_worker.kernels.native.cut_rows import NativeCutRows
    from llorch_worker.kernels.native.library import native_library

    try:
        return NativeCutRows(native_library())
    except NativeUnavailable:
        return None


def native_kernels_load() -> bool:
    """Whether this machine has native kernels for the CPU. The first call may compile."""
    return native_absence() is None


def native_absence() -> str | None:
    """Why this machine has no native kernels for the CPU; None where it has them.

    The first call may compile.
    """
    from llorch_worker.kernels.native.compiler import NativeUnavailable
    from llorch_worker.kernels.native.library import native_library

    try:
        native_library()
    except NativeUnavailable as missing:
        return str(missing)
    return None


def _for_cuda(device: torch.device, kv_form: KvForm) -> ChosenOps:
    if find_spec("triton") is None:
        return ChosenOps(TorchOps(), "Triton is not installed")
    if kv_form == "fp8" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return ChosenOps(TorchOps(), "this card has no float8 arithmetic; int8 would be faster")
    # Not at the top: it reads the environment when it is imported, and only CUDA needs it.
    from llorch_worker.kernels.triton import TritonOps

    return ChosenOps(TritonOps.of(device), "the fastest on CUDA")


def _for_cpu(dtype: torch.dtype, head_dim: int, kv_form: KvForm) -> ChosenOps:
    # Not at the top: a worker on a GPU has no use for a compiler.
    from llorch_worker.kernels.native.compiler import NativeUnavailable
    from llorch_worker.kernels.native.library import native_library
    from llorch_worker.kernels.native.native_ops import NativeOps

    refusal = NativeOps.refusal(dtype, head_dim, kv_form)
    if refusal is not None:
        return ChosenOps(TorchOps(), refusal)
    try:
        return ChosenOps(NativeOps(native_library()), "the fastest on this processor")
    except NativeUnavailable as missing:
        return ChosenOps(TorchOps(), f"no native ones, {missing}")
