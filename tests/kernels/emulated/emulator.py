"""The kernels, compiled for an architecture and called on one of its processors, emulated."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from llorch_worker.engine_options import Variant
from llorch_worker.kernels.native import build
from tests.sizes import sized


@dataclass(frozen=True)
class Architecture:
    """``uname -m`` of its machines, and where its libraries are on this one."""

    machine: str
    libraries: str

    @property
    def compiler(self) -> str:
        return f"{self.machine}-linux-gnu-gcc"

    @property
    def emulator(self) -> str:
        return f"qemu-{self.machine}"

    @property
    def missing_programs(self) -> list[str]:
        return [name for name in (self.compiler, self.emulator) if shutil.which(name) is None]


AARCH64 = Architecture("aarch64", "/usr/aarch64-linux-gnu")
X86_64 = Architecture("x86_64", "/")

PROCESSORS: dict[Variant, tuple[Architecture, str]] = {
    "neon": (AARCH64, "neoverse-n1"),
    "neonbf16": (AARCH64, "max"),
    "avx2": (X86_64, "Haswell"),
}
"""For each variant one that has it. Neoverse N1 has dot products and nothing beyond, Haswell AVX2
and nothing beyond. QEMU 7.2 emulates neither AVX-VNNI nor AVX-512."""

Array = npt.NDArray[np.generic]
Argument = Array | int | float | None
LEVEL = sized(usual="-O1", full="-O3")
"""Of optimisation for another architecture: GCC takes a third of the time that users give it."""


def library(variant: Variant, architecture: Architecture) -> Path:
    """A variant's kernels. Those of this machine are the ones that workers load."""
    if architecture.machine == platform.machine():
        return build.built(variant)
    flags = tuple(LEVEL if flag == "-O3" else flag for flag in build.FLAGS)
    with patch.object(build, "FLAGS", flags):
        return build.built(variant, architecture.compiler)


def compile_caller(folder: Path, architecture: Architecture) -> Path:
    """The program that calls kernels."""
    caller = str(Path(__file__).with_name("call.c"))
    program = folder / "call"
    subprocess.run([architecture.compiler, "-O1", caller, "-o", program], check=True)
    return program


def _pointers(arrays: Sequence[Array]) -> Iterator[str]:
    """How the caller is told of the tables' addresses."""
    for file, table in enumerate(arrays):
        if table.dtype != np.int64:
            continue
        for place, address in enumerate(table.ravel().tolist()):
            for target, array in enumerate(arrays):
                if 0 <= address - array.ctypes.data < array.nbytes:
                    yield f"R{file} {place} {target} {address - array.ctypes.data}"


@dataclass(frozen=True)
class EmulatedKernels:
    """A variant's functions on an emulated processor."""

    caller: Path
    architecture: Architecture
    processor: str
    variant: Variant

    def __call__(self, name: str, *arguments: Argument, memory: Sequence[Array] = ()) -> int:
        """Call a function, which may change the arrays among its arguments.

        ``memory``: arrays to which others point. Whole numbers of 8 bytes that are addresses in one
        of all arrays become addresses of the emulated process.

        Raises:
            subprocess.CalledProcessError: it crashed, or the processor lacks an instruction.
        """
        spelt, files = [], {}
        for number, argument in enumerate(arguments):
            if isinstance(argument, np.ndarray):
                path = self.caller.with_name(f"argument-{number}")
                argument.tofile(path)
                files[path] = argument
                spelt.append(f"P{path}")
            elif isinstance(argument, float):
                spelt.append(f"F{argument!r}")
            else:
                spelt.append("N" if argument is None else f"L{int(argument)}")
        for number, array in enumerate(memory):
            path = self.caller.with_name(f"memory-{number}")
            array.tofile(path)
            files[path] = array
            spelt.append(f"M{path}")
        spelt += _pointers(list(files.values())) if memory else []
        architecture = self.architecture
        emulator = [architecture.emulator, "-L", architecture.libraries, "-cpu", self.processor]
        program = [self.caller, library(self.variant, architecture)]
        ended = subprocess.run(
            [*emulator, *program, f"llorch_{self.variant}_{name}", *spelt],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        for path, array in files.items():
            array[...] = np.fromfile(path, array.dtype).reshape(array.shape)
        return int(ended.stdout)
