"""The kernels for AArch64, cross-compiled and called under an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llorch_worker.settings import Variant

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"
ROOT = Path(__file__).parents[3]

PROCESSORS: dict[Variant, str] = {"neon": "neoverse-n1", "neonbf16": "max"}
"""For each variant one that has it; Neoverse N1 has dot products and nothing beyond."""

Argument = npt.NDArray[np.generic] | int | float | None


def missing_programs() -> list[str]:
    return [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]


def compile_into(folder: Path) -> None:
    """The kernels as the package's build makes them, and the program that calls them."""
    subprocess.run(
        [sys.executable, str(ROOT / "hatch_build.py"), str(folder / "kernels.so")],
        env={**os.environ, "CC": COMPILER},
        check=True,
    )
    caller = str(Path(__file__).with_name("call.c"))
    subprocess.run([COMPILER, "-O1", caller, "-o", str(folder / "call")], check=True)


@dataclass(frozen=True)
class EmulatedKernels:
    """A variant's functions on an emulated processor."""

    folder: Path
    variant: Variant
    processor: str

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
        emulator = [EMULATOR, "-L", LIBRARIES, "-cpu", self.processor]
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
