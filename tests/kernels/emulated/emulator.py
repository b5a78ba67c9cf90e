"""The kernels, compiled for an architecture and called on one of its processors, emulated."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llorch_worker.kernels.native.library import LIBRARY
from llorch_worker.settings import Variant

BUILD = Path(__file__).parents[3] / "hatch_build.py"


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

Argument = npt.NDArray[np.generic] | int | float | None


def compile_into(folder: Path, architecture: Architecture, cache: Path) -> None:
    """The kernels as the package's build makes them, and the program that calls them.

    The build takes half a minute, so the folder ``cache`` keeps the library that it last made.
    """
    library = LIBRARY  # the one that workers load
    if architecture.machine != platform.machine() or not library.exists():
        library = cache / f"{architecture.machine}-{fingerprint(architecture.compiler)}.so"
        if not library.exists():
            for outdated in cache.glob(f"{architecture.machine}-*.so"):
                outdated.unlink(missing_ok=True)
            subprocess.run(
                [sys.executable, str(BUILD), str(library)],
                env={**os.environ, "CC": architecture.compiler},
                check=True,
            )
    shutil.copyfile(library, folder / "kernels.so")
    caller = str(Path(__file__).with_name("call.c"))
    program = str(folder / "call")
    subprocess.run([architecture.compiler, "-O1", caller, "-o", program], check=True)


def fingerprint(compiler: str) -> str:
    """Of all that decides what the build makes."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    found = hashlib.sha256(version)
    for source in (BUILD, *sorted(LIBRARY.parent.glob("*.[ch]")), LIBRARY.parent / "variants.py"):
        found.update(f"{source.name} {source.stat().st_size}\n".encode())
        found.update(source.read_bytes())
    return found.hexdigest()


@dataclass(frozen=True)
class EmulatedKernels:
    """A variant's functions on an emulated processor."""

    folder: Path
    architecture: Architecture
    processor: str
    variant: Variant

    def __call__(self, name: str, *arguments: Argument) -> int:
        """Call a function, which may change the arrays among its arguments.

        Raises:
            subprocess.CalledProcessError: it crashed, or the processor lacks an instruction.
        """
        spelt, files = [], {}
        for number, argument in enumerate(arguments):
            if isinstance(argument, np.ndarray):
                path = self.folder / f"argument-{number}"
                argument.tofile(path)
                files[path] = argument
                spelt.append(f"P{path}")
            elif isinstance(argument, float):
                spelt.append(f"F{argument!r}")
            else:
                spelt.append("N" if argument is None else f"L{int(argument)}")
        architecture = self.architecture
        emulator = [architecture.emulator, "-L", architecture.libraries, "-cpu", self.processor]
        program = [str(self.folder / "call"), str(self.folder / "kernels.so")]
        ended = subprocess.run(
            [*emulator, *program, f"llorch_{self.variant}_{name}", *spelt],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        for path, array in files.items():
            array[...] = np.fromfile(path, array.dtype).reshape(array.shape)
        return int(ended.stdout)
