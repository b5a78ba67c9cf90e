"""How native kernels come to be: compiled once, on torch's OpenMP, or not at all, with a reason."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llorch_worker.kernels import native_absence, select_ops
from llorch_worker.kernels.native import compiler
from llorch_worker.kernels.native.compiler import NativeUnavailable
from tests.kernels.native import library_or_skip

CPU = torch.device("cpu")

OPENMP = """
import re
from pathlib import Path
import torch
torch.set_num_threads(3)
from llorch_worker.kernels import select_ops
ops = select_ops(torch.device("cpu"), torch.bfloat16, head_dim=64)
def threads():
    return len(list(Path("/proc/self/task").iterdir()))
ops.silu_and_mul(torch.zeros(64, 4096, dtype=torch.bfloat16))
after_native = threads()
torch.ones(2**22).sum()
mapped = set(re.findall(r"/\\S*(?:gomp|iomp|libomp)\\S*", Path("/proc/self/maps").read_text()))
print(ops.name, len(mapped), threads() - after_native)
"""


def fresh_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_process_has_one_openmp_and_torch_needs_no_threads_beside_the_kernels() -> None:
    library_or_skip()
    assert fresh_process(OPENMP) == "native 1 0"


def test_processes_that_start_at_once_compile_into_one_file(tmp_path: Path) -> None:
    library_or_skip()
    command = "from llorch_worker.kernels.native.library import native_library; native_library()"
    # The compiler itself, but it need not optimise.
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
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_processor", lambda: "some processor")
    return tmp_path


def test_without_a_compiler_it_says_so(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(elsewhere))
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        compiler.shared_object(link_openmp=False)


def test_a_compile_error_is_a_reason_and_leaves_nothing(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    programs = tmp_path_factory.mktemp("programs")
    broken = programs / "cc"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo cc 1 && exit\n'
        'echo "x.c:1: error: no" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/bin:/usr/bin")
    with pytest.raises(NativeUnavailable, match=r"failed: x\.c:1: error: no"):
        compiler.shared_object(link_openmp=False)
    assert [path.suffix for path in (elsewhere / "llorch-worker").iterdir()] == [".lock"]


def test_a_cache_folder_that_cannot_be_made_is_a_reason(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "llorch-worker").write_text("a file")
    monkeypatch.setattr(compiler, "_compiler", lambda: "/bin/true")
    with pytest.raises(NativeUnavailable, match="XDG_CACHE_HOME"):
        compiler.shared_object(link_openmp=False)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_cache_folder_that_others_may_write_to_is_no_source_of_code(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    folder = elsewhere / "llorch-worker"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setattr(compiler, "_compiler", lambda: "/bin/true")
    with pytest.raises(NativeUnavailable, match="writable by other users"):
        compiler.shared_object(link_openmp=False)


def test_a_cache_folder_of_another_user_is_no_source_of_code(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "llorch-worker").mkdir(mode=0o700)
    monkeypatch.setattr(compiler, "_compiler", lambda: "/bin/true")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    # Root may do anything anyway: what it left, an image's build say, is taken.
    monkeypatch.setattr(compiler, "ROOT", owner + 2)
    with pytest.raises(NativeUnavailable, match="belongs to another user"):
        compiler.shared_object(link_openmp=False)


def test_a_cache_folder_is_made_for_this_user_alone(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_compiler", lambda: "/bin/false")
    monkeypatch.setattr(compiler, "_version_of", str)
    with pytest.raises(NativeUnavailable, match="failed"):
        compiler.shared_object(link_openmp=False)
    assert (elsewhere / "llorch-worker").stat().st_mode & 0o777 == 0o700


def test_a_user_without_a_home_has_a_reason(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(compiler, "_compiler", lambda: "/bin/true")
    with pytest.raises(NativeUnavailable, match="no home folder"):
        compiler.shared_object(link_openmp=False)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kernels", "reason"),
    [
        (torch.float32, 64, "auto", "exact reference"),
        (torch.float16, 64, "auto", "need bfloat16, not float16"),
        (torch.bfloat16, 80, "auto", "not of 80"),
        (torch.bfloat16, 64, "torch", "requested"),
    ],
)
def test_what_is_used_and_why_is_logged_once(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype, head_dim: int, kernels: str, reason: str
) -> None:
    with caplog.at_level(logging.INFO, "llorch_worker.kernels.select"):
        ops = select_ops(CPU, dtype, kernels, head_dim=head_dim)
    assert ops.name == "torch"
    (line,) = caplog.messages
    assert line.startswith("kernels: torch for")
    assert reason in line


def test_without_native_kernels_a_model_gets_the_plain_ones(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise NativeUnavailable("the processor lacks avx512_vnni")

    monkeypatch.setattr("llorch_worker.kernels.select.native_library", missing)
    with caplog.at_level(logging.INFO, "llorch_worker.kernels.select"):
        assert select_ops(CPU, torch.bfloat16, head_dim=64).name == "torch"
    assert "lacks avx512_vnni" in caplog.text
    assert native_absence() == "the processor lacks avx512_vnni"
