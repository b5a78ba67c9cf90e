"""Help is quick and complete."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llorch_worker.cli import bench
from llorch_worker.cli.options import WORKER_SETTINGS, settings_options
from tests.cli.command import environment, run

COMMANDS = (
    "demo", "doctor", "up", "chat", "worker", "generate", "submit", "watch", "cancel", "status",
    "top", "usage", "inspect", "bench", "exporter", "load", "unload", "reload",
)  # fmt: skip
BENCHES = tuple(str(command.name) for command in bench.app.registered_commands)
HEAVY = ("torch", "transformers", "celery", "kombu", "redis", "numpy", "llorch_worker.engine")


def test_the_command_line_loads_nothing_heavy_before_a_command_needs_it() -> None:
    code = (
        "import sys, llorch_worker.cli.app; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_command_is_listed_in_80_columns() -> None:
    ran = run("--help", fresh=True)
    assert ran.code == 0
    assert all(f" {command} " in ran.out for command in COMMANDS)
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "Exit codes" in ran.out


@pytest.mark.parametrize(
    "command", ["dead retry", *COMMANDS, *(f"bench {name}" for name in BENCHES)]
)
def test_every_command_explains_itself_with_nothing_cut_off_in_80_columns(command: str) -> None:
    ran = run(*command.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"llorch {command}" in ran.out
    assert "…" not in ran.out
    assert "<bool>" not in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize("group", [(), ("dead",), ("bench",)])
def test_without_a_command_only_the_help_is_shown(group: tuple[str, ...]) -> None:
    ran = run(*group)
    assert ran.code == 2
    assert "--help" in ran.out + ran.err
    assert "error" not in ran.out + ran.err


def test_the_options_of_a_worker_name_their_variables() -> None:
    shown = run("worker", "--help").out
    for name in ("device", *WORKER_SETTINGS):
        assert f"LLORCH_{name.upper()}" in shown


def test_an_option_overrides_its_variable_even_with_a_false_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLORCH_PREFIX_CACHING", "yes")
    monkeypatch.setenv("LLORCH_MAX_CONTEXT", "7")
    resolved = settings_options("prefix_caching", "max_context")(lambda settings: settings)
    settings = resolved(prefix_caching=False, max_context=None)
    assert (settings.prefix_caching, settings.max_context) == (False, 7)
