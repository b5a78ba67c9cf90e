"""``python -m benches.kernel_builds``: builds of the native kernels by turns."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from llorch_worker.kernels.native.library import LIBRARY
from tests.benches.program import run_program
from tests.kernels.native import native_or_skip


def test_each_build_is_measured_beside_the_first(demo_model: Path, tmp_path: Path) -> None:
    variant = native_or_skip().variant
    copy = tmp_path / "copy.so"
    shutil.copy(LIBRARY, copy)
    ran = run_program(
        "benches.kernel_builds",
        str(demo_model),
        str(LIBRARY),
        str(copy),
        "--variant",
        variant,
        "--rows",
        "2",
    )
    assert ran.code == 0, ran.err
    first, second = ran.out.splitlines()
    figure = r"[\d.]+ ms \(spread \d+%\): "
    assert re.fullmatch(rf"{variant}, 2 rows, {LIBRARY}: {figure}1\.00", first)
    assert re.fullmatch(rf"{variant}, 2 rows, {copy}: {figure}\d+\.\d\d", second)
