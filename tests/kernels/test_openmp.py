"""Thread pools, counted in a separate process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llorch_worker.kernels.openmp import torch_openmp

COUNT_THREADS = """
import os
import torch
from llorch_worker.kernels import end_own_threads

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
alone = threads()
torch.ones(10_000_000).sum()
together = threads()
end_own_threads()
after = threads()
torch.ones(10_000_000).sum()
print(alone, together, after, threads())
"""


@pytest.mark.skipif(torch_openmp() is None, reason="this torch ships no GNU OpenMP")
def test_a_thread_can_end_and_recreate_its_pool() -> None:
    run = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True
    )
    alone, together, after, again = map(int, run.stdout.split())
    assert together == alone + 2
    assert after == alone
    assert again == together
