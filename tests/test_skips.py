"""How skipped tests are counted: pytest runs on files of a folder."""

from __future__ import annotations

from pathlib import Path

from tests.pytest_runs import run_pytest

CONFTEST = """
from tests.skips import one_skip_for_each_lack as pytest_collection_modifyitems
from tests.skips import pytest_terminal_summary
"""
TESTS = """
import pytest

MOONS = pytest.mark.lacks("needs two moons", when=True)

@pytest.fixture(params=["here", pytest.param("there", marks=MOONS)])
def place(request):
    return request.param

@pytest.mark.parametrize("number", range(3))
def test_a(place, number):
    assert place == "here"

def test_b():
    pytest.skip("needs Debian's sun")
"""


def test_all_that_lack_the_same_are_one_skip_that_says_how_many(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = lacks\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_these.py").write_text(TESTS)
    done = run_pytest(tmp_path, "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, end = done.stdout.partition("skipped, and what would run them")
    _, first, second, *closing = end.splitlines()
    assert {first, second} == {"    1  needs two moons (3 tests)", "    1  needs Debian's sun"}
    assert "3 passed, 2 skipped in" in "".join(closing)
