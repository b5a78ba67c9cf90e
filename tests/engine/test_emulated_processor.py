"""A whole engine on an emulated processor that has AVX2 and nothing beyond."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.native import native_or_skip

EMULATOR = "qemu-x86_64"

GENERATE = """
import sys
import torch
from pathlib import Path
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
torch.set_num_threads(1)
request = GenerationRequest(prompt="Once upon a time", max_tokens=12, temperature=0)
options = {"device": "cpu", "max_context": 64, "max_sequences": 1, "kernels": sys.argv[2]}
with Engine.load(Path(sys.argv[1]), **options) as engine:
    print(engine.submit(request).result(timeout=500).choices[0].token_ids)
print("closed", flush=True)
"""

ONE_OPERATION_BEYOND = """
from llorch_worker.kernels.native.library import native_kernels
from llorch_worker.kernels.native.native_ops import NativeOps
NativeOps(native_kernels("avx512")).silu_and_mul(torch.ones(3, 64).bfloat16())
"""


@pytest.fixture(autouse=True, scope="module")
def _emulator() -> None:
    native_or_skip()
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"{EMULATOR} is missing: Debian's qemu-user")


def run(code: str, *arguments: str, emulated: bool) -> subprocess.CompletedProcess[str]:
    before = [EMULATOR, "-cpu", "Haswell"] if emulated else []
    return subprocess.run(
        [*before, sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def arguments(trained_model: Path) -> tuple[str, ...]:
    return (str(trained_model / "q8_0.gguf"), "avx2")


@pytest.fixture(scope="module")
def there(arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """One process for both tests: there, its imports take half a minute."""
    return run(GENERATE + ONE_OPERATION_BEYOND, *arguments, emulated=True)


@pytest.mark.timeout(900)
def test_avx2_kernels_run_where_there_is_nothing_beyond_and_write_the_same(
    arguments: tuple[str, ...], there: subprocess.CompletedProcess[str]
) -> None:
    here = run(GENERATE, *arguments, emulated=False)
    assert here.returncode == 0, here.stderr
    assert there.stdout == here.stdout, there.stderr
    tokens, closed = there.stdout.splitlines()
    assert (tokens.count(","), closed) == (11, "closed")


@pytest.mark.timeout(900)
def test_the_emulated_processor_stops_at_an_instruction_beyond(
    there: subprocess.CompletedProcess[str],
) -> None:
    native_or_skip("avx512")
    assert there.returncode == -signal.SIGILL
