"""What `make` says before it installs anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

OLD_PYTHON = f"""#!/bin/sh
exec {sys.executable} -c '
import sys
sys.version_info, sys.executable = (3, 9, 18), "$0"
exec(sys.argv[2])
' "$@"
"""
"""A Python that takes itself for an older one."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


def make_test(checkout: Path, *arguments: str) -> str:
    """The first line of what the target says, which fails."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    ran = subprocess.run(
        ["make", "test", *arguments],
        cwd=checkout,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert not list(checkout.glob(".venv/.installed-*"))
    return ran.stderr.splitlines()[0]


def write_python(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OLD_PYTHON.replace("$0", str(path)))
    path.chmod(0o755)
    return path


def test_an_old_python_is_refused_before_it_makes_an_environment(checkout: Path) -> None:
    python = write_python(checkout / "python3.9")
    said = make_test(checkout, f"PYTHON={python}")
    assert said == (
        f"error: llorch-worker needs Python 3.11 or newer; {python} is 3.9; "
        "run make PYTHON=python3.11"
    )
    assert not (checkout / ".venv").exists()


def test_an_environment_of_an_old_python_is_refused(checkout: Path) -> None:
    python = write_python(checkout / ".venv/bin/python")
    assert make_test(checkout) == (
        f"error: llorch-worker needs Python 3.11 or newer; {python} is 3.9; "
        "run make clean, then make PYTHON=python3.11"
    )


def test_an_environment_that_could_not_be_made_is_not_left(checkout: Path) -> None:
    python = checkout / "python3"
    # As Debian's without python3-venv.
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\nmkdir -p .venv/bin\n'
        'touch .venv/bin/python; echo "ensurepip is not available" >&2; exit 1\n'
    )
    python.chmod(0o755)
    assert make_test(checkout, f"PYTHON={python}") == "ensurepip is not available"
    assert not (checkout / ".venv").exists()
