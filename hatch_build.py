"""Compiles the kernels for CPUs when a wheel or an editable install is built.

All variants go into one shared library. Without a C compiler the package is built without it, and
workers use torch's kernels. ``python hatch_build.py [FILE]`` compiles, and builds nothing else.

The library is no extension module: ctypes loads it, so one wheel fits every Python. Nothing links
OpenMP: its symbols are those of torch's own library, which is loaded before (``library.py``).

The compiler decides the architecture: ``CC=aarch64-linux-gnu-gcc`` builds for AArch64 anywhere.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "llorch_worker" / "kernels" / "native"
LIBRARY = NATIVE / "kernels.so"
VARIANTS = runpy.run_path(str(NATIVE / "variants.py"))
FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno"),
    # These two would compute all products before the first sum, and keep them on the stack.
    *("-fno-tree-reassoc", "-fno-tree-ter"),
)


class CompiledKernels(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        LIBRARY.unlink(missing_ok=True)  # never one of other sources
        reason = why_not()
        if reason is not None:
            self.app.display_warning(f"no kernels for CPUs: {reason}; workers will use torch's")
            return
        compile_kernels()
        build_data["pure_python"] = False
        build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))
        build_data["tag"] = f"py3-none-linux_{target().partition('-')[0]}"


def why_not() -> str | None:
    """The reason why there is nothing to compile, or nothing to compile it with; or None."""
    if shutil.which(compiler()) is None:
        return f"no C compiler {compiler()} on the PATH"
    if not target_variants():
        return f"they are for Linux on x86-64 and AArch64, not for {target()}"
    return None


def compiler() -> str:
    return os.environ.get("CC", "cc")


def target() -> str:
    """What the compiler compiles for: ``x86_64-linux-gnu``."""
    asked = [compiler(), "-dumpmachine"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def target_variants() -> list[str]:
    """The variants of the target, if it is Linux."""
    machine, _, system = target().partition("-")
    variants: list[str] = VARIANTS["variants_of"](machine) if "linux" in system else []
    return variants


def compile_kernels(library: Path = LIBRARY) -> None:
    """Compile every source once a variant.

    Raises:
        subprocess.CalledProcessError: a source does not compile.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:

        def compiled(variant: str, source: Path) -> str:
            made = f"{scratch}/{variant}-{source.stem}.o"
            flags = (*FLAGS, *VARIANTS["compiler_flags"](variant))
            subprocess.run([compiler(), *flags, "-c", str(source), "-o", made], check=True)
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(compiled, variant, source)
                for variant in target_variants()
                for source in sorted(NATIVE.glob("*.c"))
            ]
            objects = [job.result() for job in jobs]
        built = f"{scratch}/{library.name}"
        subprocess.run([compiler(), "-shared", *objects, "-lm", "-o", built], check=True)
        os.replace(built, library)  # a worker that has the old one open keeps it


if __name__ == "__main__":
    compile_kernels(*map(Path, sys.argv[1:]))
