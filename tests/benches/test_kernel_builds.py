"""``python -m benches.kernel_builds``: builds of the native kernels by turns."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from llorch_worker.kernels.native.build import built
from tests.benches.program import run_program
from tests.kernels.native import native_or_skip


def test_each_build_is_measured_beside_the_first(demo_model: Path, tmp_path: Path) -> None:
    variant = native_or_skip().variant
    library = built(variant)
    copy = tmp_path / "copy.so"
    shutil.copy(library, copy)
    ran = run_program(
        "benches.kernel_builds",
        str(demo_model),
        str(library),
        str(copy),
        "--variant",
        variant,
        "--rows",
        "2",
    )
    assert ran.code == 0, ran.err
    first, second = ran.out.splitlines()
    figure = r"[\d.,]+ ms \(spread \d+%\): "
    assert re.fullmatch(rf"{variant}, 2 rows, 1\. {re.escape(str(library))}: {figure}1\.00", first)
    assert re.fullmatch(rf"{variant}, 2 rows, 2\. \S+copy\.so: {figure}\d+\.\d\d", second)


def test_bad_arguments_end_with_a_sentence(demo_model: Path, tmp_path: Path) -> None:
    variant = native_or_skip().variant
    library = built(variant)
    text = tmp_path / "text.so"
    text.write_text("no library")
    model = tmp_path / "model.gguf"
    model.write_text("no model")
    ran = run_program("benches.kernel_builds", str(model), str(library), "--variant", variant)
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert ran.err.startswith("error: ")
    for build, rows, complaint in (
        (text, "1", "the compiled kernels cannot be loaded"),
        (library, "1,x", "'x' is not a number from 1 up"),
        (library, "0", "'0' is not a number from 1 up"),
        (tmp_path / "none.so", "1", "none.so does not exist"),
    ):
        arguments = [str(demo_model), str(build), "--variant", variant, "--rows", rows]
        ran = run_program("benches.kernel_builds", *arguments)
        assert ran.code == 2
        assert complaint in ran.err
        assert "Traceback" not in ran.err
