"""The device of an engine: which one, what is free there, and its compute dtype."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import torch

from llorch_worker import control_groups
from llorch_worker.contract.errors import InvalidLoadOption
from llorch_worker.devices import DeviceUnavailable, no_such_card, usable_cards
from llorch_worker.engine_options import KernelChoice
from llorch_worker.kernels import find_native_kernels, native_absence

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_LIMITS = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""By the version of control groups: where the limit and what is used stand, and how the figures of
``memory.stat`` begin that count the groups within."""

EXACT_PARAMETERS = 100_000_000
"""Smaller models run in float32 on the CPU by default."""


def resolve_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` names.

    ``auto`` is the first CUDA device, or else the CPU. ``cuda`` is never the CPU.

    Raises:
        InvalidLoadOption: the name is unknown.
        DeviceUnavailable: the device is absent; the message names the present ones and a remedy.
    """
    if name == "cpu":
        return torch.device("cpu")
    # Card numbers are nvidia-smi's; CUDA's own order puts the fastest first.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    match = re.fullmatch(r"auto|cuda(?::(\d+))?", name)
    if match is None:
        raise InvalidLoadOption(
            f"unknown device {name!r}; allowed: auto, cpu, cuda, cuda:N with a card's number"
        )
    if not torch.cuda.is_available():
        usable_cards()  # raises if the driver or the card is missing
        reason = "cannot use the card" if torch.version.cuda else "is built without CUDA"
        raise DeviceUnavailable(
            f"cannot use device {name}: this torch {reason}; install a CUDA build of torch that "
            "fits the driver, or use device cpu"
        )
    index = int(match[1] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise no_such_card(index, count)
    return torch.device("cuda", index)


def visible_cards(device: torch.device) -> tuple[str, ...]:
    """The UUIDs of the cards that torch sees beside ``device``; empty unless that is a card."""
    if device.type != "cuda":
        return ()
    count = torch.cuda.device_count()
    return tuple(str(torch.cuda.get_device_properties(n).uuid) for n in range(count))


def check_kernels(kernels: KernelChoice, device: torch.device) -> None:
    """Refuse native kernels that cannot run here.

    Raises:
        InvalidLoadOption: another device, or a processor without their instructions.
    """
    if kernels == "auto" or kernels == "torch":
        return
    if device.type != "cpu":
        raise InvalidLoadOption(f"kernels {kernels} are for a CPU; for {device} take auto or torch")
    absence = native_absence(kernels)
    if absence is not None:
        raise InvalidLoadOption(f"kernels {kernels} cannot run here: {absence}; take auto")


def resolve_dtype(
    name: str, device: torch.device, *, parameters: int, kernels: KernelChoice = "auto"
) -> torch.dtype:
    """The compute dtype of a model with this many parameters.

    ``auto`` is bfloat16 on CUDA. On the CPU it is float32, the exact reference, for small models
    and on processors without native kernels. Otherwise, and with the native kernels that
    ``kernels`` names, it is bfloat16, which leaves quantised matrices quantised.

    Raises:
        InvalidLoadOption: the name is unknown.
    """
    if name == "auto":
        if device.type == "cpu" and (
            (kernels == "auto" and parameters < EXACT_PARAMETERS)
            or find_native_kernels(kernels) is None
        ):
            return torch.float32
        return torch.bfloat16
    if name not in DTYPES:
        raise InvalidLoadOption(f"unknown dtype {name!r}; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def free_bytes(device: torch.device, most: int | None = None) -> int:
    """Memory on ``device`` that is free now, within this container's limit and ``most``."""
    free = _free_bytes(device)
    return free if most is None else min(free, most)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        # Otherwise the memory that torch keeps of freed tensors counts as used.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = int(psutil.virtual_memory().available)
    group = _cgroup_free_bytes()
    return free if group is None else min(free, group)


def _cgroup_free_bytes(root: Path = control_groups.ROOT) -> int | None:
    """Bytes left below the least limit of this process' control group and of those around it, which
    the machine's own figures ignore."""
    groups = control_groups.folders("memory", root)
    found = (_left_bytes(folder, *_LIMITS[version]) for folder, version in groups)
    return min((left for left in found if left is not None), default=None)


def _left_bytes(folder: Path, limit_name: str, used_name: str, prefix: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        used = int((folder / used_name).read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + _cached_bytes(folder, prefix))


def _cached_bytes(folder: Path, prefix: str) -> int:
    """Bytes of cached file pages. They count as used, but the kernel drops them on demand."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split(" ", 1) for line in lines)
    return sum(int(sizes.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
