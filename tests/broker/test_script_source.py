"""What a script gets of the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

import llorch_worker.broker
from llorch_worker.broker import scripts
from llorch_worker.broker.script_source import link

SCRIPTS = Path(llorch_worker.broker.__file__).parent / "lua"

LIBRARY = """
local TEXT = 'text' -- not code
local count = 0

-- Calls of this.
local function counted(value) -- the caller's
  count = count + 1
  return value .. count
end

local function unused() return counted(2) end

local function helper(value) return '<' .. counted(value) .. '>' end

local function seldom(value) -- rare
  return helper(value .. TEXT)
end
"""


def run(store: redis.Redis, script: str) -> object:
    return store.eval(link(LIBRARY, script, {"MORE": "'more'"}), 0)


def test_a_script_gets_what_it_uses_and_no_more() -> None:
    linked = link(LIBRARY, "return counted(MORE)", {"MORE": "'more'"})
    assert "local count = 0" in linked
    assert "return counted(('more'))" in linked
    for name in ("unused", "helper", "seldom", "TEXT", "this", "caller's"):
        assert name not in linked


def test_what_only_rare_functions_use_is_defined_in_them(store: redis.Redis) -> None:
    linked = link(LIBRARY, "return seldom('a')", {})
    assert linked.index("function seldom") < linked.index("function helper")
    assert store.eval(linked, 0) == "<atext1>"


def test_a_scripts_own_rare_function_holds_what_it_alone_uses(store: redis.Redis) -> None:
    script = """
local function mostly_not(value) -- rare
  return helper(value)
end

return counted('a') .. mostly_not('b')
"""
    linked = link(LIBRARY, script, {})
    assert linked.index("function mostly_not") < linked.index("function helper")
    assert store.eval(linked, 0) == "a1<b2>"


def test_what_others_use_too_keeps_its_state(store: redis.Redis) -> None:
    assert run(store, "return counted('a') .. seldom('b') .. counted(MORE)") == "a1<btext2>more3"


def test_two_constants_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="TEXT twice"):
        link(LIBRARY, "local TEXT = 'other'\nreturn TEXT", {})


def test_redis_reads_each_script(store: redis.Redis) -> None:
    names = {path.stem for path in SCRIPTS.glob("*.lua")} - {"prelude"}
    for name in names:
        assert "_key(" not in scripts.source(name)
        assert store.script_load(scripts.source(name)) == scripts.digest(name)
