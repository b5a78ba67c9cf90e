"""Thread pools, counted in a separate process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llorch_worker.kernels.openmp import torch_openmp
from tests.kernels.native import native_or_skip

COUNT_THREADS = """
import os
import time
import torch
from llorch_worker.kernels import end_own_threads

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
alone = threads()
torch.ones(10_000_000).sum()
together = threads()
end_own_threads()
# The kernel may list a thread for a moment after it was joined.
until_s = time.monotonic() + 30
while threads() > alone and time.monotonic() < until_s:
    time.sleep(0.01)
after = threads()
torch.ones(10_000_000).sum()
print(alone, together, after, threads())
"""


OPENMP = """
import re
from pathlib import Path
import torch
torch.set_num_threads(3)
from llorch_worker.kernels import choose_ops
ops = choose_ops(torch.device("cpu"), torch.bfloat16, head_dim=64).ops
def threads():
    return len(list(Path("/proc/self/task").iterdir()))
ops.silu_and_mul(torch.zeros(64, 4096, dtype=torch.bfloat16))
after_native = threads()
torch.ones(2**22).sum()
mapped = set(re.findall(r"/\\S*(?:gomp|iomp|libomp)\\S*", Path("/proc/self/maps").read_text()))
print(ops.name, len(mapped), threads() - after_native)
"""


def fresh_process(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_torch_and_the_kernels_share_one_openmp_and_its_threads() -> None:
    native_or_skip()
    assert fresh_process(OPENMP) == "native 1 0"


@pytest.mark.skipif(torch_openmp() is None, reason="this torch ships no GNU OpenMP")
def test_a_thread_can_end_and_recreate_its_pool() -> None:
    alone, together, after, again = map(int, fresh_process(COUNT_THREADS).split())
    assert together == alone + 2
    assert after == alone
    assert again == together
