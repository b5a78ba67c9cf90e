"""Every Triton kernel compiles for four kinds of cards, even on a machine without one.

``LLORCH_FULL_SIZE=1`` compiles every variant that is launched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.sizes import sized

MULTIPLIES = ("attention", "product", "formed", "int8", "fp8")
"""Kernels that use tensor cores; float32 ones do not, because tensor cores round."""


def test_every_kernel_fits_every_card_and_spills_no_register(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.kernels.compile_for_cards",
            *sized(usual=(), full=("--all",)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=sized(usual=300, full=1200),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "warning" not in done.stderr.lower()
    for name, kernel in json.loads(done.stdout).items():
        assert kernel["stack_bytes"] == 0, name
        assert kernel["fits"], name
        assert kernel["tensor_cores"] == name.startswith(MULTIPLIES), name
