"""The stub for users' tests: the cookbook's own tests pass in a project that has no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import REPOSITORY, environment

WITHOUT_TORCH = """
import sys

sys.modules["torch"] = sys.modules["transformers"] = None
"""
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest")
"""Plug-ins that the cookbook does not ask for."""


def code_of(section: str) -> list[str]:
    """The Python of a section of the cookbook, block by block."""
    text = (REPOSITORY / "docs/COOKBOOK.md").read_text()
    (found,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"```python\n(.*?)```", found, re.DOTALL)


def test_the_tests_of_the_cookbook_pass_without_redis_torch_or_a_worker(tmp_path: Path) -> None:
    pytest.importorskip("fakeredis", reason='needs the extra "testing"')
    plugin, celery_tests, http_tests = code_of("Tests of your own")
    files = {
        "conftest.py": WITHOUT_TORCH + plugin,
        "stories.py": code_of("Celery: chain, group, chord")[0],
        "test_stories.py": celery_tests,
        "test_chat.py": http_tests,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *WITHOUT, "--import-mode=prepend"],
        cwd=tmp_path,
        env=environment("redis://127.0.0.1:1/0"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "3 passed" in run.stdout, run.stdout + run.stderr
