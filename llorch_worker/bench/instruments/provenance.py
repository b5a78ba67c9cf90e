"""Where figures come from: the machine, the versions, the threads and the exact command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from llorch_worker.worker.card.assignment import SPIN_COUNT, SPINS

MEASURED_WITH = ("torch", "numpy", "gguf")
_SETTINGS_PREFIXES = (
    "LLORCH_",
    "OMP_",
    "GOMP_",
    "MKL_",
    "ONEDNN_",
    "DNNL_",
    "TORCH_",
    "CUDA_",
    "MALLOC_",
)
_LEFT_OUT = {"LLORCH_REDIS_URL", "CUDA_DEVICE_ORDER"}
"""A secret, and what a process sets for itself."""


class Machine(BaseModel):
    """The hardware, and how busy it was with other things when the command began."""

    model_config = ConfigDict(frozen=True)

    processor: str
    usable_cpus: int
    vector_unit: str
    """What torch makes use of: AVX2, AVX512 and the like."""
    memory_bytes: int
    system: str
    device: str
    load_1min: float | None
    """Processes that wanted a CPU over the last minute; None where the system does not tell."""


class Provenance(BaseModel):
    """All that it takes to measure again."""

    model_config = ConfigDict(frozen=True)

    command: str
    environment: dict[str, str]
    """Variables that may change what is measured."""
    machine: Machine
    versions: dict[str, str]
    threads: int
    seed: int


def provenance(
    *,
    device: str,
    seed: int,
    program: tuple[str, ...] = ("llorch",),
    measured_with: tuple[str, ...] = (),
) -> Provenance:
    """Of this process as it is now; ``device`` is torch's name for it, ``cpu`` or ``cuda:0``.

    ``program``: what stands before the arguments; ``measured_with``: further packages whose
    versions matter.
    """
    import torch

    return Provenance(
        command=shlex.join([*program, *sys.argv[1:]]),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_SETTINGS_PREFIXES)
            and name not in _LEFT_OUT
            and (name, value) != (SPINS, SPIN_COUNT)
        },
        machine=_machine(device),
        versions={
            "llorch-worker": _version("llorch-worker"),
            "python": platform.python_version(),
            **{name: _version(name) for name in (*MEASURED_WITH, *measured_with)},
        },
        threads=torch.get_num_threads(),
        seed=seed,
    )


def _machine(device: str) -> Machine:
    import psutil
    import torch

    place = torch.device(device)
    name = "cpu" if place.type == "cpu" else f"{place}: {torch.cuda.get_device_name(place)}"
    return Machine(
        processor=_processor(),
        usable_cpus=_usable_cpus(),
        vector_unit=torch.backends.cpu.get_cpu_capability(),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        device=name,
        load_1min=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from the checkout"
