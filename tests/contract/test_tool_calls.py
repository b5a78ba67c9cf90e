from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.tool_calls import may_be_calls, tool_calls

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "weather_now"}},
]
CALL = '{"name": "weather", "parameters": {"city": "Bern", "days": 2.50}}'
OTHER = '{"name": "weather_now", "parameters": {}}'


def asking(**fields: Any) -> GenerationRequest:
    given = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, **fields}
    return GenerationRequest(**given)


def named(text: str, **fields: Any) -> list[tuple[str, str]] | None:
    calls = tool_calls(text, asking(**fields), job_id="job", choice=0)
    return None if calls is None else [(c.function.name, c.function.arguments) for c in calls]


ONE = [("weather", '{"city": "Bern", "days": 2.50}')]
TWO = [*ONE, ("weather_now", "{}")]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CALL, ONE),
        (f"\n {CALL}\n", ONE),
        (f"<|python_tag|>{CALL}", ONE),
        (f"{CALL}; {OTHER}", TWO),
        (f"{CALL};{OTHER}", TWO),
        (f"[{CALL}, {OTHER}]", TWO),
        (f"[ {CALL} ]", ONE),
        (CALL.replace("parameters", "arguments"), ONE),
        (f"<tool_call>\n{CALL}\n</tool_call>", ONE),
        (f"\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n", TWO),
        (CALL.replace('{"name"', '{"type": "function", "name"'), ONE),
        (
            CALL.replace(" ", "").replace(",", "\n,\n"),
            [("weather", '{"city":"Bern"\n,\n"days":2.50}')],
        ),
    ],
)
def test_calls_are_read_as_the_model_wrote_them(text: str, calls: list[tuple[str, str]]) -> None:
    assert named(text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello",
        f"Certainly: {CALL}",
        f"{CALL} I hope that helps.",
        f"{CALL};",
        f"{CALL} {OTHER}",
        f"[{CALL}",
        f"<tool_call>{CALL}",
        f"<tool_call>{CALL}</tool_call> and more",
        f"<tool_call>{CALL}</tool_call>{OTHER}",
        f"<tool_call>[{CALL}]</tool_call>",
        "<tool_call></tool_call>",
        f"[{CALL}] and more",
        f"[{CALL};{OTHER}]",
        "[]",
        "{}",
        CALL[:-1],
        CALL.replace("weather", "forecast"),
        CALL.replace('{"city": "Bern", "days": 2.50}', '"Bern"'),
        CALL.replace("2.50", "NaN"),
        '{"name": "weather"}',
        '{"name": "weather", "parameters": {}, "id": 3}',
        '{"name": "weather", "type": "tool", "parameters": {}}',
        '{"name": "weather", [1]: 2, "parameters": {}}',
        '{"name": "weather", "parameters": ' + '{"a":' * 100_000,
    ],
)
def test_any_other_text_is_text(text: str) -> None:
    assert named(text) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": ".*"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_request_that_asks_for_no_call_gets_none(fields: dict[str, Any]) -> None:
    assert named(CALL, **fields) is None
    assert not may_be_calls("", asking(**fields))


def test_only_the_first_call_counts_where_one_is_asked_for() -> None:
    assert named(f"{CALL}; {OTHER}", parallel_tool_calls=False) == ONE


def test_ids_depend_on_job_choice_and_place_alone() -> None:
    def ids(job_id: str, choice: int) -> list[str]:
        calls = tool_calls(f"{CALL}; {CALL}", asking(), job_id=job_id, choice=choice)
        return [call.id for call in calls or ()]

    places = [("job", 0), ("job", 1), ("other", 0)]
    assert len({each for place in places for each in ids(*place)}) == 6
    assert ids("job", 0) == ids("job", 0)


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f" <|python_tag|>{CALL}; {OTHER}",
        f"[{CALL},\n{OTHER}]",
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>",
    ],
)
def test_calls_are_held_back_from_their_first_character(text: str) -> None:
    assert all(may_be_calls(text[:end], asking()) for end in range(len(text) + 1))


@pytest.mark.parametrize(
    ("text", "shown_from"),
    [
        ("Hello", 1),
        ('{"answer": 3}', 3),
        ('{"name": "Bern"}', 11),
        ("<b>", 2),
        ("[1]", 2),
        ("<tool_call>none", 12),
        ("<tools>", 6),
    ],
)
def test_other_text_is_shown_as_soon_as_it_is_no_call(text: str, shown_from: int) -> None:
    held = [may_be_calls(text[:end], asking()) for end in range(len(text) + 1)]
    assert held == [True] * shown_from + [False] * (len(text) + 1 - shown_from)


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=4,
)


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["weather", "weather_now"]), st.dictionaries(st.text(), JSON)),
        min_size=1,
        max_size=4,
    ),
    listed=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_whatever_calls_are_written_are_read(
    calls: list[tuple[str, dict[str, Any]]], listed: bool, indent: int | None
) -> None:
    objects = [{"name": name, "parameters": arguments} for name, arguments in calls]
    spelt = [json.dumps(each, indent=indent) for each in objects]
    text = json.dumps(objects, indent=indent) if listed else "; ".join(spelt)
    read = named(text)
    assert read is not None
    assert [(name, json.loads(arguments)) for name, arguments in read] == calls


@given(st.text(alphabet='{}[]":,; \nnametypwhrfuciopdl</|_>0'))
def test_text_that_was_shown_never_becomes_a_call(text: str) -> None:
    shown = False
    for end in range(len(text) + 1):
        assert not (shown and may_be_calls(text[:end], asking()))
        shown = not may_be_calls(text[:end], asking())
    if shown:
        assert named(text) is None
