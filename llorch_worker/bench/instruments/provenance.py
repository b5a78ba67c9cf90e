"""The provenance of figures: the machine, the versions, the threads and the exact command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from abc import abstractmethod
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.worker.card.assignment import SPIN_COUNT, SPINS

if TYPE_CHECKING:
    from rich.console import RenderableType

MEASURED_WITH = ("torch", "numpy", "gguf")
_SETTINGS_PREFIXES = (
    *("LLORCH_", "OMP_", "GOMP_", "MKL_", "ONEDNN_"),
    *("DNNL_", "TORCH_", "CUDA_", "MALLOC_"),
)
_LEFT_OUT = {"LLORCH_REDIS_URL", "CUDA_DEVICE_ORDER"}
"""A secret, and a variable that the process sets for itself."""


class Frozen(BaseModel):
    """A part of a command's JSON document."""

    model_config = ConfigDict(frozen=True)


class Machine(Frozen):
    """The hardware, and its load when the command began."""

    processor: str
    usable_cpus: int
    vector_unit: str
    """The instruction set that torch uses, such as AVX2 or AVX512."""
    memory_bytes: int
    system: str
    device: str
    load_1min: float | None
    """Load average of the last minute; None if the system does not report it."""


class Provenance(Frozen):
    """Everything needed to repeat the measurement."""

    command: str
    environment: dict[str, str]
    """Environment variables that may change the figures."""
    machine: Machine
    versions: dict[str, str]
    threads: int
    seed: int

    def lines(self) -> list[str]:
        """The lines above every table and plot."""
        machine = self.machine
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        busy = "" if machine.load_1min is None else f", load {machine.load_1min:.1f} at the start"
        return [
            " ".join(["$", *settings, self.command]),
            f"  {machine.processor} ({machine.vector_unit}), {counted(machine.usable_cpus, 'CPU')}"
            f", {human_bytes(machine.memory_bytes)}{busy}",
            f"  {machine.system}; device {machine.device}",
            "  " + ", ".join(f"{name} {number}" for name, number in self.versions.items()),
            f"  {counted(self.threads, 'thread')}, seed {self.seed}",
        ]


class Figures(Frozen):
    """The document of a command's ``--json``."""

    provenance: Provenance

    @abstractmethod
    def parts(self) -> Iterator[RenderableType]:
        """The text form: headings, tables and remarks."""


def provenance(
    *,
    device: str,
    seed: int,
    program: tuple[str, ...] = ("llorch",),
    measured_with: tuple[str, ...] = (),
) -> Provenance:
    """The provenance of this process now; ``device`` is torch's name for it: ``cpu``, ``cuda:0``.

    ``program``: the words before the arguments; ``measured_with``: further packages whose versions
    matter.
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
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        processor=_processor(),
        usable_cpus=len(affinity(0)) if affinity else os.cpu_count() or 1,
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
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from the checkout"
