"""Which implementation of the operations a model gets."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

from llorch_worker.kernels import torch_ops
from llorch_worker.kernels.interface import FusedSample, Ops
from llorch_worker.kernels.torch_ops import TorchOps
from llorch_worker.settings import KernelChoice, KvDtype

FP8_CAPABILITY = (8, 9)
"""Ada and later convert float8 e4m3; Triton compiles it for no card before."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChosenOps:
    """Operations, and why these."""

    ops: Ops
    reason: str


class TruncateRows(Protocol):
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
        """Sets the weights of the excluded tokens to 0; a row that begins with NaN stays as it is.

        Args:
            weights: [any, vocab] float32, the probabilities of all tokens; changed in place.
            scaled: [any, vocab] float32, logits over temperature.
            rows: [truncated] int64, which ones; None for all.
            log_min_p: [truncated] float32, -inf where off.
            top_k: [truncated] int64, the vocabulary's size where off.
            top_p: [truncated] float64, inf where off.
        """


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice = "auto",
    *,
    head_dim: int,
    kv_dtype: KvDtype = "auto",
) -> Ops:
    """The operations for a model in ``dtype`` on ``device``; logs which they are, and why."""
    chosen = choose_ops(device, dtype, kernels, head_dim=head_dim, kv_dtype=kv_dtype)
    _log.info("kernels: %s for %s on %s: %s", chosen.ops.name, dtype, device, chosen.reason)
    return chosen.ops


def choose_ops(
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice = "auto",
    *,
    head_dim: int,
    kv_dtype: KvDtype = "auto",
) -> ChosenOps:
    """As ``select_ops``, in silence. The first call on a machine may compile."""
    if kernels == "torch":
        return ChosenOps(TorchOps(), "asked for")
    if device.type == "cuda":
        return _for_cuda(device, kv_dtype)
    if device.type == "cpu":
        return _for_cpu(dtype, head_dim, kv_dtype)
    return ChosenOps(TorchOps(), f"there are no others for {device.type}")


def select_sample(device: torch.device, kernels: KernelChoice = "auto") -> FusedSample | None:
    """What samples on ``device`` without a word from the host; None where the host computes."""
    if device.type != "cuda":
        return None
    if kernels == "torch" or find_spec("triton") is None:
        return torch_ops.sample
    from llorch_worker.kernels.triton.sample import sample  # not at the top: see _for_cuda

    return sample


def select_truncate_rows(
    device: torch.device, dtype: torch.dtype, kernels: KernelChoice = "auto"
) -> TruncateRows | None:
    """The kernel that truncates beside a model in ``dtype`` on ``device``.

    None when there is none, or when the compiler would have to run for it alone: a bfloat16 model
    has the native kernels compiled anyway."""
    if device.type != "cpu" or dtype is not torch.bfloat16 or kernels == "torch":
        return None
    from llorch_worker.kernels.native.compiler import NativeUnavailable
    from llorch_worker.kernels.native.library import native_library
    from llorch_worker.kernels.native.truncate_rows import NativeTruncateRows

    try:
        return NativeTruncateRows(native_library())
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


def _for_cuda(device: torch.device, kv_dtype: KvDtype) -> ChosenOps:
    if find_spec("triton") is None:
        return ChosenOps(TorchOps(), "Triton is not installed")
    if kv_dtype == "fp8" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return ChosenOps(TorchOps(), "this card has no float8 arithmetic; int8 would be faster")
    # Not at the top: it reads the environment when it is imported, and only CUDA needs it.
    from llorch_worker.kernels.triton import TritonOps

    return ChosenOps(TritonOps.of(device), "the fastest on CUDA")


def _for_cpu(dtype: torch.dtype, head_dim: int, kv_dtype: KvDtype) -> ChosenOps:
    # Not at the top: a worker on a GPU has no use for a compiler.
    from llorch_worker.kernels.native.compiler import NativeUnavailable
    from llorch_worker.kernels.native.library import native_library
    from llorch_worker.kernels.native.native_ops import NativeOps

    refusal = NativeOps.refusal(dtype, head_dim, kv_dtype)
    if refusal is not None:
        return ChosenOps(TorchOps(), refusal)
    try:
        return ChosenOps(NativeOps(native_library()), "the fastest on this processor")
    except NativeUnavailable as missing:
        return ChosenOps(TorchOps(), f"no native ones, {missing}")
