"""Every kernel compiles for a card, also where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MULTIPLIES = ("decode", "prefill", "matmul")
"""On tensor cores; in float32 nothing is, because they round."""


def test_every_kernel_compiles_for_hopper_and_keeps_to_its_registers(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, kernel in json.loads(done.stdout).items():
        assert kernel["stack_bytes"] == 0, name
        assert kernel["tensor_cores"] == name.startswith(MULTIPLIES), name
