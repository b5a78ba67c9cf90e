"""A whole engine on emulated processors that have AVX-512 and nothing beyond a variant's own.

Each takes two to three minutes. They need Bochs, and a kernel that need not be installed:

    apt-get install bochs bochs-term xorriso isolinux syslinux-common busybox-static
    apt-get download $(apt-cache depends linux-image-cloud-amd64 | grep -o "linux-image-6.*")
    dpkg-deb --extract linux-image-*.deb FOLDER
    LLORCH_TEST_LINUX=FOLDER python -m pytest -p no:benchmark tests/engine/emulated_pc
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llorch_worker.kernels.native.build import built
from llorch_worker.kernels.native.variants import variants_of
from llorch_worker.settings import Variant
from tests.engine.emulated_pc import pc
from tests.kernels.native import native_or_skip

HERE = Path(__file__).parent
CACHE = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
REPOSITORY = HERE.parents[2]

PROCESSORS: dict[Variant, str] = {"avx512": "corei7_skylake_x", "avx512vnni": "corei7_icelake_u"}
"""Bochs 2.7 emulates nothing that has BF16, AVX-VNNI or AMX."""

ENVIRONMENT = {
    "PYTHONPATH": str(REPOSITORY),
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "LC_ALL": "C.UTF-8",
    "XDG_CACHE_HOME": CACHE,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PC's."""
    return tmp_path_factory.mktemp("pc")


@pytest.fixture(scope="module")
def written(folder: Path, demo_model: Path) -> Iterator[list[str]]:
    """What the kernels for AVX2 write here; a CD is in the folder that does the same there."""
    native_or_skip("avx2")
    if missing := pc.missing_packages():
        pytest.skip(f"missing: Debian's {', '.join(missing)}")
    program = [str(HERE / "write_text.py"), str(demo_model)]
    done = subprocess.run(
        [sys.executable, str(HERE / "record.py"), "opened", *program, "avx2"],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    opened = [Path(line) for line in (folder / "opened").read_text().splitlines()]
    # There is no compiler on the CD.
    opened += map(built, variants_of("x86_64"))
    pc.make_cd(folder, opened, [sys.executable, *program, "auto"], ENVIRONMENT)
    yield done.stdout.splitlines()
    (folder / pc.CD).unlink()  # 600 MiB that pytest would keep


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", PROCESSORS)
def test_a_variant_writes_the_same_where_there_is_nothing_beyond(
    folder: Path, written: list[str], variant: Variant
) -> None:
    chosen, *there = pc.run_pc(folder, PROCESSORS[variant])
    assert chosen == variant
    tokens = written[1:]
    assert there[: len(tokens)] == tokens
    # The processor would have stopped the variant at an instruction beyond its own.
    assert there[len(tokens)] == "beyond"
    assert there[-1] == f"exit status {128 + signal.SIGILL}"
