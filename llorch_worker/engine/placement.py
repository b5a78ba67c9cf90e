"""Which device and which compute dtype an engine uses."""

from __future__ import annotations

import os
import re

import torch

from llorch_worker.contract import ModelLoadFailed

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N`` as a device that is there.

    ``auto`` is the first CUDA device, else the CPU. Asked for CUDA it is never the CPU.

    Raises:
        ModelLoadFailed: no such device; says what there is and what to do.
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
        reason = "this torch is built without CUDA" if not torch.version.cuda else "none is visible"
        raise ModelLoadFailed(
            f"device {name} was asked for, but {reason}; use device cpu, "
            "or install a CUDA build of torch and check `nvidia-smi`"
        )
    index = int(match[1] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise ModelLoadFailed(
            f"device {name} was asked for, but there are {count} CUDA devices; "
            f"use cuda:0 to cuda:{count - 1}"
        )
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on the CPU, where results are exact, and bfloat16 on CUDA.

    Raises:
        ModelLoadFailed: an unknown name.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ModelLoadFailed(f"there is no dtype {name!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]
