"""Building native kernels: compiled once, or not at all, with a reason."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llorch_worker.kernels import choose_ops, native_absence
from llorch_worker.kernels.native import compiler
from llorch_worker.kernels.native.compiler import NativeUnavailable
from llorch_worker.settings import KernelChoice
from tests.kernels.native import library_or_skip

CPU = torch.device("cpu")


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    library_or_skip()
    command = "from llorch_worker.kernels.native.library import native_library; native_library()"
    # The real compiler without optimisation, for speed.
    programs = tmp_path / "programs"
    programs.mkdir()
    quick = programs / "cc"
    quick.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler._compiler())} "$@" -O0\n')
    quick.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    starting = [
        subprocess.Popen([sys.executable, "-c", command], env=environment) for _ in range(2)
    ]
    assert [process.wait() for process in starting] == [0, 0]
    kept = [path.suffix for path in (tmp_path / "llorch-worker").iterdir()]
    assert sorted(kept) == [".lock", ".so"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, not yet created; the processor suits and the compiler does nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_processor", lambda: "some processor")
    install_compiler(monkeypatch, tmp_path / "programs", "exit 0")
    return tmp_path / "llorch-worker"


def install_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Put a ``cc`` that runs ``script``, except for ``--version``, on the PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / "cc"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo cc 1 && exit\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def refuse(match: str) -> None:
    with pytest.raises(NativeUnavailable, match=match):
        compiler.shared_object(link_openmp=False)


def test_a_missing_compiler_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    refuse("no C compiler")


def test_a_compile_error_is_reported_and_leaves_no_files(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_compiler(monkeypatch, tmp_path / "programs", 'echo "x.c:1: error: no" >&2; exit 1')
    refuse(r"failed: x\.c:1: error: no")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_folder_that_cannot_be_made_is_reported(cache: Path) -> None:
    cache.write_text("a file")
    refuse("XDG_CACHE_HOME")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_cache_folder_that_others_can_write_to_is_refused(cache: Path, mode: int) -> None:
    cache.mkdir()
    cache.chmod(mode)
    refuse("writable by other users")


def test_a_cache_folder_of_another_user_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    # Root's files are trusted, and the tests may run as root.
    monkeypatch.setattr(compiler, "ROOT", owner + 2)
    refuse("belongs to another user")


@pytest.mark.usefixtures("cache")
def test_a_user_without_a_home_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    refuse("no home folder")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kernels", "reason"),
    [
        (torch.float32, 64, "auto", "exact reference"),
        (torch.float16, 64, "auto", "need bfloat16, not float16"),
        (torch.bfloat16, 80, "auto", "not of 80"),
        (torch.bfloat16, 64, "torch", "requested"),
    ],
)
def test_torch_is_chosen_with_the_reason(
    dtype: torch.dtype, head_dim: int, kernels: KernelChoice, reason: str
) -> None:
    chosen = choose_ops(CPU, dtype, kernels, head_dim=head_dim)
    assert chosen.ops.name == "torch"
    assert reason in chosen.reason


def test_without_native_kernels_a_model_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NativeUnavailable("the processor lacks avx512_vnni")

    monkeypatch.setattr("llorch_worker.kernels.select.native_library", missing)
    chosen = choose_ops(CPU, torch.bfloat16, head_dim=64)
    assert chosen.ops.name == "torch"
    assert "lacks avx512_vnni" in chosen.reason
    assert native_absence() == "the processor lacks avx512_vnni"
