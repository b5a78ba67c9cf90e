"""When the native kernels are compiled, and what is said where they cannot be."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.forks import run_forked
from tests.kernels.native import VARIANTS, native_or_skip

LEAST = VARIANTS[-1] if VARIANTS else "avx2"

CHOOSE = """
import torch
from llorch_worker.kernels import choose_ops
for _ in range(2):
    print(choose_ops(torch.device("cpu"), torch.bfloat16, head_dim=64).reason)
"""


def run(module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_forked(module, *arguments, environment=os.environ | variables, timeout_s=60)


@pytest.fixture(autouse=True)
def _here() -> None:
    native_or_skip()


def test_processes_that_need_the_kernels_at_once_compile_them_once(tmp_path: Path) -> None:
    compiler, calls = tmp_path / "cc", tmp_path / "calls"
    # What it makes is empty: nothing here runs it.
    compiler.write_text(
        f'#!/bin/sh\necho "$*" >> {calls}\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(0o755)
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CC": str(compiler)}
    with ThreadPoolExecutor(3) as threads:
        build = partial(run, "llorch_worker.kernels.native", **variables)
        ended = list(threads.map(build, [LEAST] * 3))
    assert [ran.returncode for ran in ended] == [0, 0, 0], ended
    (library,) = {ran.stdout.strip() for ran in ended}
    assert sum("-shared" in line for line in calls.read_text().splitlines()) == 1
    said = [line for ran in ended for line in ran.stderr.splitlines()]
    assert said[0] == f"compiling the kernels for {LEAST}, once for this machine"
    assert said[1].startswith("compiled the kernels in ")
    assert len(said) == 2
    files = Path(library).parent.iterdir()
    assert {file.suffix for file in files} == {".so", ".lock"}, "nothing else stays"


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PATH": ""}, "there is no C compiler cc on the PATH; install gcc and libc6-dev"),
        ({"CC": "false"}, "false cannot compile for {variant}: exit code 1; install gcc"),
        ({"XDG_CACHE_HOME": "{file}"}, "compiled kernels cannot be kept in {file}/llorch/kernels"),
        ({"XDG_CACHE_HOME": "", "HOME": "nowhere"}, "there is no home folder to keep"),
    ],
)
def test_kernels_that_cannot_be_compiled_leave_torchs_with_the_reason_and_the_remedy(
    variables: dict[str, str], reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    variables = {name: text.format(file=file) for name, text in variables.items()}
    ran = run("-c", CHOOSE, **(cache | variables))
    assert ran.returncode == 0, ran.stderr
    reason = reason.format(file=file, variant=LEAST)
    for line in ran.stdout.splitlines():
        assert line.startswith(f"no native kernels: {reason}")
    assert ran.stderr.count(f"slower kernels are used: {reason}") == 1, "said once"
