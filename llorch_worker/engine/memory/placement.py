"""Which device and which compute dtype an engine uses."""

from __future__ import annotations

import os
import re

import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.devices import DeviceUnavailable, no_such_card, usable_cards
from llorch_worker.kernels import native_kernels_load
from llorch_worker.settings import KernelChoice

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

EXACT_PARAMETERS = 100_000_000
"""Models below this are computed in float32 on the CPU unless told otherwise."""


def resolve_device(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N`` as a device that is there.

    ``auto`` is the first CUDA device, else the CPU. Asked for CUDA it is never the CPU.

    Raises:
        ModelLoadFailed: there is no device of this name.
        DeviceUnavailable: it is not there; says what there is and what to do.
    """
    if name == "cpu":
        return torch.device("cpu")
    # Card numbers are nvidia-smi's; CUDA's own order puts the fastest first.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    match = re.fullmatch(r"auto|cuda(?::(\d+))?", name)
    if match is None:
        raise ModelLoadFailed(
            f"there is no device {name!r}; use auto, cpu, cuda or cuda:N with a card's number"
        )
    if not torch.cuda.is_available():
        usable_cards()  # where it is the driver or the card that is missing, this says so
        reason = "cannot use the card" if torch.version.cuda else "is built without CUDA"
        raise DeviceUnavailable(
            f"device {name} was asked for, but this torch {reason}; install a CUDA build of torch "
            "that fits the driver, or use device cpu"
        )
    index = int(match[1] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise no_such_card(index, count)
    return torch.device("cuda", index)


def resolve_dtype(
    name: str, device: torch.device, *, parameters: int, kernels: KernelChoice = "auto"
) -> torch.dtype:
    """The compute dtype for a model of so many parameters.

    ``auto`` is bfloat16 on CUDA. On the CPU it is float32, the exact reference, for a model small
    enough that exactness costs little, and on processors for which there are no native kernels;
    for larger ones bfloat16, in which quantised matrices stay quantised.

    Raises:
        ModelLoadFailed: an unknown name.
    """
    if name == "auto":
        if device.type == "cpu" and (
            parameters < EXACT_PARAMETERS or kernels != "auto" or not native_kernels_load()
        ):
            return torch.float32
        return torch.bfloat16
    if name not in DTYPES:
        raise ModelLoadFailed(f"there is no dtype {name!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]
