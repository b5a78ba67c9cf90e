"""The table of a job's states, and that the scripts keep to it."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from llorch_worker.broker import keys, scripts

SCRIPTS = sorted(
    path.name.removesuffix(".lua")
    for path in (files("llorch_worker.broker") / "lua").iterdir()
    if path.name.endswith(".lua") and path.name != "prelude.lua"
)
STATES = {"waiting", "scheduled", "claimed", "ended"}
FUNCTION = re.compile(r"^local function (\w+)\(.*?^end$", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"redis\.p?call\('HSET', (?:[^()]|\([^()]*\))*?'state', '(\w+)'")


def written_by(script: str) -> set[str]:
    """The states that a script, with the functions that it may call, writes into a record."""
    source = re.sub(r"--.*", "", scripts.source(script))
    functions = {found[1]: found[0] for found in FUNCTION.finditer(source)}
    bodies = [FUNCTION.sub("", source)]
    reached: set[str] = set()
    for body in bodies:
        # A function may be called by another that gets it.
        called = {name for name in re.findall(r"\b\w+\b", body) if name in functions}
        bodies += [functions[name] for name in called - reached]
        reached |= called
    return {state for body in bodies for state in WRITTEN.findall(body)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_moves_jobs_only_as_the_table_says(script: str) -> None:
    assert written_by(script) == set(keys.MOVES.get(script, {}))


def test_the_table_knows_all_states_and_each_can_be_left() -> None:
    assert {to for moves in keys.MOVES.values() for to in moves} == STATES
    left = {state for moves in keys.MOVES.values() for found in moves.values() for state in found}
    assert left == {*STATES, None}
