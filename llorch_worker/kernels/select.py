"""Chooses the implementation of a model's operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch

from llorch_worker.engine_options import KernelChoice, KvDtype, Variant
from llorch_worker.kernels import torch_ops
from llorch_worker.kernels.interface import FusedSample, Ops, TruncateRows
from llorch_worker.kernels.invariant_ops import InvariantOps
from llorch_worker.kernels.native.library import (
    NativeKernels,
    NativeUnavailable,
    native_kernels,
)
from llorch_worker.kernels.native.native_ops import NativeOps
from llorch_worker.kernels.native.truncate_rows import truncate_rows
from llorch_worker.kernels.native.variants import is_measured
from llorch_worker.kernels.torch_ops import TorchOps

FP8_CAPABILITY = (8, 9)
"""Ada and later cards convert float8 e4m3; Triton refuses to compile it for earlier ones."""


@dataclass(frozen=True)
class ChosenOps:
    """Operations, and why they were chosen."""

    ops: Ops
    reason: str


def choose_ops(
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice = "auto",
    *,
    head_dim: int,
    kv_dtype: KvDtype = "auto",
    batch_invariant: bool = False,
) -> ChosenOps:
    """The operations for a model in ``dtype`` on ``device``.

    With ``batch_invariant`` a row's result has the same bits in every batch.
    """
    torch_ops = InvariantOps() if batch_invariant else TorchOps()
    if kernels == "torch":
        return ChosenOps(torch_ops, "requested")
    if device.type == "cuda":
        refusal = _triton_refusal(device, kv_dtype)
        if refusal is not None:
            return ChosenOps(torch_ops, refusal)
        # Not at the top: Triton reads the environment when imported, and only CUDA needs it.
        from llorch_worker.kernels.triton import TritonOps

        ops = TritonOps.of_card(device, batch_invariant=batch_invariant)
        return ChosenOps(ops, "the fastest on CUDA")
    if device.type != "cpu":
        return ChosenOps(torch_ops, f"{device.type} has no other kernels")
    refusal = NativeOps.refusal(dtype, head_dim)
    if refusal is not None:
        return ChosenOps(torch_ops, refusal)
    try:
        native = native_kernels(kernels)
    except NativeUnavailable as missing:
        return ChosenOps(torch_ops, f"no native kernels: {missing}")
    why = "the fastest that runs here" if kernels == "auto" else "requested"
    if not is_measured(native.variant):
        why += "; tested under an emulator, measured on no such machine"
    return ChosenOps(NativeOps(native), f"{native.variant}, {why}")


def select_sample(device: torch.device, kernels: KernelChoice = "auto") -> FusedSample | None:
    """The kernel that samples on ``device`` without the host; None if the host samples."""
    if device.type != "cuda":
        return None
    if kernels == "torch" or find_spec("triton") is None:
        return torch_ops.sample
    from llorch_worker.kernels.triton.sample import sample  # not at the top: see choose_ops

    return sample


def select_truncate_rows(
    device: torch.device, kernels: KernelChoice = "auto"
) -> TruncateRows | None:
    """The kernel that truncates on ``device``, if there is one."""
    if device.type != "cpu":
        return None
    native = find_native_kernels(kernels)
    return None if native is None else partial(truncate_rows, native)


def find_native_kernels(kernels: KernelChoice = "auto") -> NativeKernels | None:
    """The native kernels of this choice for the CPU, if this machine runs them."""
    if kernels == "torch":
        return None
    try:
        return native_kernels(kernels)
    except NativeUnavailable:
        return None


def native_absence(kernels: Variant | Literal["auto"] = "auto") -> str | None:
    """The reason why this machine does not run these native kernels for the CPU, or None."""
    try:
        native_kernels(kernels)
    except NativeUnavailable as missing:
        return str(missing)
    return None


def _triton_refusal(device: torch.device, kv_dtype: KvDtype) -> str | None:
    """The reason why the Triton kernels cannot run on this card, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if kv_dtype == "fp8" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return "this card has no float8 arithmetic; int8 would be faster"
    return None
