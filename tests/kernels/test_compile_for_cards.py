"""Every Triton kernel compiles for four kinds of cards, even on a machine without one.

``LLORCH_FULL_SIZE=1`` compiles every variant that is launched.
"""

from __future__ import annotations

import json
import os
import re
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
        if name.startswith("product"):
            assert kernel["loop"]["barriers"] == kernel["loop"]["exchanges"] == 0, name
            few = most_instructions(name)
            assert 0 < kernel["per_32_weights"] <= few, (name, kernel["per_32_weights"])


def most_instructions(name: str) -> int:
    """For 32 weights, in a product with up to 8, 16 or 32 tokens and one tile of rows or two, which
    share what is loaded for them. A single tile is for small matrices, or many tokens."""
    tokens, tiles = map(int, re.findall(r"with (\d+), (\d)", name)[0])
    return {(8, 2): 120, (16, 2): 200, (8, 1): 140, (32, 1): 380}[tokens, tiles]
