"""Compiles the C sources of this folder to a shared object, which is cached on disk."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-DVARIANT=native")
COMPILERS = ("cc", "gcc", "clang")
REQUIRED_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni"})
TIMEOUT_S = 120.0
ROOT = 0
"""Root's files are trusted like the user's: an image's build may have compiled the kernels."""
_ELSEWHERE = "set XDG_CACHE_HOME to use another folder"


class NativeUnavailable(Exception):
    """The native kernels cannot be used here; the message says why."""


def shared_object(*, link_openmp: bool) -> Path:
    """The compiled kernels, from the cache folder or compiled into it.

    If several processes start at once, one compiles and the others wait. With ``link_openmp`` the
    object links the system's OpenMP library; otherwise it uses the one that the process has loaded.

    Raises:
        NativeUnavailable: there is no compiler or no suitable processor, another user could write
            to the cache folder, or compiling failed.
    """
    processor = _processor()
    compiler = _compiler()
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256()
    for part in (processor, _version_of(compiler), " ".join(FLAGS), str(link_openmp)):
        digest.update(part.encode() + b"\0")
    for source in (*sources, *sorted(SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    folder = cache_folder()
    target = folder / f"kernels-{digest.hexdigest()[:24]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(folder)
        if target.exists():
            return target
        with (
            _only_one(target.with_suffix(".lock")),
            tempfile.TemporaryDirectory(dir=folder) as scratch,
        ):
            if not target.exists():
                # Renamed when done, so that a file under its final name is complete.
                _build(compiler, sources, Path(scratch), link_openmp).replace(target)
    except OSError as error:
        raise NativeUnavailable(
            f"cannot write to {folder}: {error.strerror} ({_ELSEWHERE})"
        ) from error
    return target


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/llorch-worker``, or ``~/.cache/llorch-worker``."""
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "llorch-worker"
    try:
        return Path.home() / ".cache" / "llorch-worker"
    except RuntimeError as error:
        raise NativeUnavailable(f"this user has no home folder ({_ELSEWHERE})") from error


def _require_own(folder: Path) -> None:
    """Raise if another user could have put files there, because they are executed."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), ROOT):
        raise NativeUnavailable(f"{folder} belongs to another user ({_ELSEWHERE})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailable(f"{folder} is writable by other users ({_ELSEWHERE})")


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """A lock between processes; the kernel releases it if its holder dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _processor() -> str:
    """The processor, for ``-march=native``; raises if it lacks an instruction set."""
    try:
        information = Path("/proc/cpuinfo").read_text()
    except OSError as error:
        raise NativeUnavailable(f"no /proc/cpuinfo on {platform.system()}") from error
    fields = dict[str, str]()
    for line in information.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    missing = REQUIRED_CPU_FLAGS - set(fields.get("flags", "").split())
    if missing:
        raise NativeUnavailable(f"the processor lacks {', '.join(sorted(missing))}")
    return f"{fields.get('model name')} {fields['flags']}"


def _compiler() -> str:
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeUnavailable(f"no C compiler ({', '.join(COMPILERS)}) on the PATH")


def _version_of(compiler: str) -> str:
    return _run([compiler, "--version"]).partition("\n")[0]


def _build(compiler: str, sources: list[Path], scratch: Path, link_openmp: bool) -> Path:
    def compiled(source: Path) -> Path:
        target = scratch / f"{source.stem}.o"
        _run([compiler, *FLAGS, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(target) for target in pool.map(compiled, sources)]
    built = scratch / "kernels.so"
    openmp = ["-fopenmp"] if link_openmp else []
    _run([compiler, "-shared", *openmp, *objects, "-lm", "-o", str(built)])
    return built


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        complaints = [line for line in done.stderr.splitlines() if "error" in line]
        first = next(iter(complaints or done.stderr.splitlines()), f"exit {done.returncode}")
        raise NativeUnavailable(f"{command[0]} failed: {first.strip()}")
    return done.stdout
