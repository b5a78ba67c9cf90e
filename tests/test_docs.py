"""README and docs/: links lead somewhere, and commands and files exist."""

from __future__ import annotations

import inspect
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from llorch_worker.cli.app import app
from llorch_worker.client import AsyncClient, AsyncJob, Client, Job, JobStatus

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *(REPOSITORY / "docs").glob("*.md")]
MOST_BYTES = 138_500
"""Of all pages together: who has to know more than that reads nothing."""


def anchors(page: Path) -> set[str]:
    """What a link may name after ``#``, as GitHub makes it of the headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_pages_stay_short() -> None:
    assert sum(len(page.read_bytes()) for page in PAGES) <= MOST_BYTES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_scripts_exist(page: Path) -> None:
    text = page.read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, second in re.findall(r"(?<!-n )\bllorch ([a-z][a-z-]*)(?: ([a-z]+))?", code_of(text)):
        assert name in commands, f"llorch {name}"
        group = getattr(commands[name], "commands", None)
        assert group is None or not second or second in group, f"llorch {name} {second}"
    for module in re.findall(r"python -m\s+((?:benches|tests|llorch_worker)[\w.]*)", text):
        assert find_spec(module) is not None, module
    for script in re.findall(r"\b(?:benches|tools|tests)/[\w/]+\.py\b", text):
        assert (REPOSITORY / script).is_file(), script


SOURCES = [
    path
    for folder in ("llorch_worker", "tests", "benches", "tools", "deploy", ".ci")
    for path in (REPOSITORY / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
]


@cache
def ends_of_paths() -> frozenset[str]:
    """The path of each file of this repository, also without its first folders."""
    parts = [path.relative_to(REPOSITORY).parts for path in SOURCES]
    return frozenset("/".join(each[at:]) for each in parts for at in range(len(each)))


def missing_files(text: str) -> set[str]:
    """Scripts of Python and Lua that ``text`` names, and that this repository does not have."""
    named = re.findall(r"(?<![\w/.:{}*~-])(?:[a-z_.][\w.]*/)*[a-z_]\w*\.(?:py|lua)\b(?!\w)", text)
    return set(named) - ends_of_paths()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", page.read_text())
    if page.name == "COOKBOOK.md":  # the reader makes the others
        spans = [span for span in spans if "/" in span]
    assert missing_files("\n".join(spans)) == set()


def test_files_and_modules_that_comments_name_exist() -> None:
    missing: dict[str, set[str]] = {}
    for path in SOURCES:
        if path.suffix not in (".py", ".lua"):
            continue
        source = path.read_text()
        mark = "--" if path.suffix == ".lua" else "#"
        spans = re.findall(rf"``([^`]+)``|{mark} (.*)$", source, re.MULTILINE)
        found = missing_files("\n".join(map(" ".join, spans)))
        for name in re.findall(r":mod:`(?:\.+|(?=llorch_worker|tests|benches))([\w.]+)`", source):
            ends = (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py")
            if ends_of_paths().isdisjoint(ends):
                found.add(name)
        if found:
            missing[str(path.relative_to(REPOSITORY))] = found
    assert missing == {}


def code_of(text: str) -> str:
    """What stands in blocks of code and in backticks, line breaks within it aside."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*blocks, *(" ".join(span.split()) for span in spans)])


def test_the_clients_page_names_all_that_is_public_and_nothing_else() -> None:
    page = (REPOSITORY / "docs" / "CLIENT.md").read_text()
    named = {match[1] for match in re.finditer(r"^\| `(\w+)\((?:[^)`]*)\)` ", page, re.MULTILINE)}
    public = {
        name
        for kind in (Client, Job)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    assert named == public
    for ours, theirs in ((Client, AsyncClient), (Job, AsyncJob)):
        for name in named & set(vars(ours)):
            assert hasattr(theirs, name), name
    (fields,) = re.findall(r"`JobStatus` has (.*?):", page, re.DOTALL)
    listed = set(re.findall(r"`(\w+)`", fields))
    assert listed | {"forgotten"} == {*JobStatus.__dataclass_fields__, "ended"}
