"""How often a fixture is made that fails: pytest runs on files of a folder."""

from __future__ import annotations

from pathlib import Path

from tests.pytest_runs import run_pytest

CONFTEST = """
import pytest
from tests.failed_fixtures import pytest_fixture_setup

@pytest.fixture(scope="module")
def shared(request):
    tries = request.path.with_suffix(".tries")
    with tries.open("a") as file:
        file.write("x")
    assert request.path.stem == "test_late" and tries.read_text() == "xx"
"""
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_a(shared, number): ...
"""


def test_a_fixture_of_a_module_is_made_twice_however_many_tests_fail_with_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("broken", "late"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    done = run_pytest(tmp_path, "--reruns", "1")
    assert "3 passed, 3 errors, 4 rerun in" in done.stdout, done.stdout + done.stderr
    tries = {path.stem: path.read_text() for path in tmp_path.glob("*.tries")}
    assert tries == {"test_broken": "xx", "test_late": "xx"}
