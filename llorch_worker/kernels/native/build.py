"""Compiles the kernels, once for each machine: a variant's library stays in a folder of the user's.

The package holds sources only, so that it is the same on every machine, and needs no compiler where
nothing computes. ``python -m llorch_worker.kernels.native`` compiles ahead, for an image.

The libraries are no extension modules: ctypes loads them, so one fits every Python. Nothing links
OpenMP: its symbols are those of torch's own library, which is loaded before (``library.py``).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llorch_worker.engine_options import Variant
from llorch_worker.kernels.native.variants import compiler_flags

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno"),
    # These two would compute all products before the first sum, and keep them on the stack.
    *("-fno-tree-reassoc", "-fno-tree-ter"),
)
NEEDS = "install gcc and libc6-dev, or name another C compiler with CC"
SET_FOLDER = "set XDG_CACHE_HOME to a folder that takes files"


class CannotBuild(Exception):
    """A variant cannot be compiled here; the message says why, and what to do."""


def built(variant: Variant, compiler: str | None = None) -> Path:
    """The library of a variant, which is compiled if this machine has none of these sources.

    Processes that need it at once wait for the one that compiles. ``compiler`` is a program's name,
    by default that of the environment variable ``CC``, or ``cc``. It decides the architecture:
    ``aarch64-linux-gnu-gcc`` compiles for AArch64 anywhere.

    Raises:
        CannotBuild: there is no compiler, it refuses the sources, or the folder takes no files.
    """
    compiler = compiler or os.environ.get("CC", "cc")
    library = _folder() / f"{variant}-{_key(variant, compiler)}.so"
    if library.exists():
        return library
    if shutil.which(compiler) is None:
        raise CannotBuild(f"there is no C compiler {compiler} on the PATH; {NEEDS}")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(variant, compiler, library)
    except OSError as error:
        raise CannotBuild(
            f"compiled kernels cannot be kept in {library.parent}: {error.strerror}; {SET_FOLDER}"
        ) from error
    return library


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not Path(cache).is_absolute():
        raise CannotBuild(f"there is no home folder to keep compiled kernels in; {SET_FOLDER}")
    return Path(cache, "llorch", "kernels")


def _key(variant: Variant, compiler: str) -> str:
    """Of the sources, the flags, the compiler's name and the C library."""
    settled = (compiler, *FLAGS, *compiler_flags(variant), os.confstr("CS_GNU_LIBC_VERSION"))
    digest = hashlib.sha256("\n".join(map(str, settled)).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(f"\n{source.name}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(variant: Variant, compiler: str, library: Path) -> None:
    # A warning, because a process that has set up no logs shows warnings only.
    logger.warning("compiling the kernels for %s, once for this machine", variant)
    began_s = time.monotonic()
    # Left by a process that was killed; the lock is ours.
    scratch = library.with_suffix(".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()

    def compiled(source: Path) -> str:
        made = str(scratch / f"{source.stem}.o")
        _run(variant, compiler, *FLAGS, *compiler_flags(variant), "-c", str(source), "-o", made)
        return made

    try:
        # The largest takes longest, and begins first.
        sources = sorted(SOURCES.glob("*.c"), key=lambda file: -file.stat().st_size)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compiled, sources))
        linked = scratch / library.name
        _run(variant, compiler, "-shared", *objects, "-lm", "-o", str(linked))
        with linked.open("rb") as file:
            os.fsync(file.fileno())  # or a power loss leaves the name without the content
        linked.replace(library)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.warning("compiled the kernels in %.0f s", time.monotonic() - began_s)


def _run(variant: Variant, *command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if "error" in line] or [
            f"exit code {ran.returncode}"
        ]
        raise CannotBuild(f"{command[0]} cannot compile for {variant}: {lines[0].strip()}; {NEEDS}")
