"""What an installed package puts into an environment, and what it leaves there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tests.services import REPOSITORY

THEIR_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "shop"
version = "1"
[tool.hatch.build.targets.wheel]
packages = ["tasks"]
"""
FOUND = """
import importlib.util, json, sys
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(json.dumps({name: spec and spec.origin for name, spec in specs.items()}))
"""


COMMAND = """
import json
from llorch_worker.contract.installing import install_command
print(json.dumps(install_command("worker")))
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in which nothing is installed."""

    folder: Path

    @classmethod
    def empty(cls, folder: Path) -> Environment:
        venv.create(folder, symlinks=True)
        return cls(folder)

    @property
    def packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def pip(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "pip", "--quiet", "--python", str(self.folder)]
        subprocess.run([*command, *map(str, arguments)], check=True)

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-index", "--no-deps", wheel)

    def run(self, code: str, *arguments: str) -> Any:
        """What a program of a process elsewhere prints."""
        command = [self.folder / "bin/python", "-P", "-c", code, *arguments]
        # The dependencies come from here. Python reads no .pth file there.
        folders = {str(distribution(name).locate_file("")) for name in ("editables", "pydantic")}
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
        ran = subprocess.run(
            command, env=variables, cwd=self.folder, capture_output=True, check=True
        )
        return json.loads(ran.stdout)

    def find(self, *modules: str) -> Any:
        """The file of each module, or None."""
        return self.run(FOUND, *modules)


def built(project: Path, folder: Path, kind: str = "wheel") -> Path:
    """What pip installs of a project, or with ``editable`` what ``pip install --editable`` does."""
    build = f"from hatchling.build import build_{kind} as build; build({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=project, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def our_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(REPOSITORY, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def their_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a team that uses Celery, and so has a package ``tasks``."""
    project = tmp_path_factory.mktemp("shop")
    (project / "pyproject.toml").write_text(THEIR_PROJECT)
    (project / "tasks").mkdir()
    (project / "tasks/__init__.py").write_text("OURS = 'theirs'")
    return built(project, tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_leaves_a_package_tasks_of_the_user_alone(
    kind: str, our_wheel: Path, their_wheel: Path, tmp_path: Path
) -> None:
    environment = Environment.empty(tmp_path / "venv")
    ours = our_wheel if kind == "wheel" else built(REPOSITORY, tmp_path, kind)
    theirs = str(environment.packages / "tasks/__init__.py")

    environment.install(ours)
    found = environment.find("llorch_worker.tasks", "tasks", "tests", "benches", "tools")
    assert found.pop("llorch_worker.tasks")
    assert found == dict.fromkeys(found), "nothing beside llorch_worker"
    environment.install(their_wheel)
    assert environment.find("tasks") == {"tasks": theirs}
    environment.pip("uninstall", "--yes", "llorch-worker")
    assert environment.find("tasks") == {"tasks": theirs}
    environment.install(ours)
    assert environment.find("tasks") == {"tasks": theirs}
    assert Path(theirs).read_text() == "OURS = 'theirs'"


def test_the_command_for_an_extra_names_the_place_that_the_package_came_from(
    our_wheel: Path, tmp_path: Path
) -> None:
    environment = Environment.empty(tmp_path / "venv")
    environment.install(our_wheel)
    # Where the tests' packages are, this one may be too.
    code = f"import sys; sys.path.insert(0, {str(environment.packages)!r})\n{COMMAND}"
    place = next(environment.packages.glob("llorch_worker-*/direct_url.json"))
    git = {"vcs_info": {"vcs": "git", "commit_id": "1f"}}
    pip = f"{environment.folder}/bin/python -m pip install "
    assert environment.run(code) == f"{pip}'{our_wheel}[worker]'", "as pip has noted it"
    for noted, what in (
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, "--editable '/a b[worker]'"),
        ({"url": "file:///a", "dir_info": {}}, "'/a[worker]'"),
        ({"url": "https://h/a.whl"}, "'llorch-worker[worker] @ https://h/a.whl'"),
        ({"url": "https://h/a.git"} | git, "'llorch-worker[worker] @ git+https://h/a.git@1f'"),
    ):
        place.write_text(json.dumps(noted))
        assert environment.run(code) == pip + what
    place.unlink()
    assert environment.run(code) == f"{pip}'.[worker]'"
