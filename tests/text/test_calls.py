"""Calls of tools are read as each dialect writes them, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.tools import MAX_ARGUMENTS_CHARS
from llorch_worker.text.calls import LONGEST_HEAD_CHARS, CallReader, reader_of
from llorch_worker.text.dialects import (
    DIALECTS,
    GRANITE,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_LIST,
    PHI,
    Dialect,
    dialect_of,
)

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "weather_now"}},
]
CALL = '{"name": "weather", "parameters": {"city": "Bern", "days": 2.50}}'
OTHER = '{"name": "weather_now", "parameters": {}}'
ONE = [("weather", '{"city": "Bern", "days": 2.50}')]
TWO = [*ONE, ("weather_now", "{}")]
Calls = list[tuple[str, str]]


def asking(**fields: Any) -> GenerationRequest:
    given = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, **fields}
    return GenerationRequest(**given)


def reader(dialect: Dialect = HERMES, **fields: Any) -> CallReader:
    made = reader_of(asking(**fields), dialect, "job", 0)
    assert made is not None
    return made


def read(text: str, dialect: Dialect = HERMES, size: int = 0, **fields: Any) -> tuple[str, Calls]:
    """The text and the calls of an answer that comes in pieces of ``size`` characters."""
    reading = reader(dialect, **fields)
    shown, parts = "", []
    for start in range(0, len(text), size or len(text) or 1):
        shown += reading.push(text[start : start + (size or len(text))])
        parts += reading.take()
    shown += reading.flush()
    calls = [(call.function.name, call.function.arguments) for call in reading.calls]
    streamed: dict[int, list[str]] = {}
    for part in parts:
        if part.id is not None:
            assert part.index == len(streamed)
            streamed[part.index] = [part.name or "", ""]
        streamed[part.index][1] += part.arguments
    assert [tuple(call) for call in streamed.values()][: len(calls)] == calls
    assert len(streamed) <= len(calls) + 1
    return shown, calls


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(
    ("text", "dialect", "calls"),
    [
        *((dialect.write(ONE), dialect, ONE) for dialect in DIALECTS),
        *((dialect.write(TWO), dialect, TWO) for dialect in DIALECTS),
        (CALL, LLAMA3, ONE),
        (f"\n {CALL}\n", LLAMA3, ONE),
        (f"<|python_tag|>{CALL}", LLAMA3, ONE),
        (f"{CALL}; {OTHER}", LLAMA3, TWO),
        (f"{CALL};{OTHER}", LLAMA3, TWO),
        (f"{CALL}\n{OTHER}", LLAMA3, TWO),
        (f"[{CALL}, {OTHER}]", LLAMA3, TWO),
        (f"[ {CALL} ]", HERMES, ONE),
        (f'{{ "tool_calls":[{CALL}]}}', HERMES, ONE),
        (CALL.replace("parameters", "arguments"), MISTRAL, ONE),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n", HERMES, TWO),
        (CALL.replace('{"name"', '{"type": "function", "name"'), LLAMA3, ONE),
        (CALL.replace("}}", '}, "id": "3"}') + f"; {OTHER}", LLAMA3, TWO),
        (
            CALL.replace(" ", "").replace(",", "\n,\n"),
            LLAMA3,
            [("weather", '{"city":"Bern"\n,\n"days":2.50}')],
        ),
        (
            '[TOOL_CALLS]weather[CALL_ID]a1b2[ARGS]{"city": "}"}[TOOL_CALLS]weather_now[ARGS]{}',
            MISTRAL,
            [("weather", '{"city": "}"}'), ("weather_now", "{}")],
        ),
        (
            '<tool_call>\n{"arguments": {"city": "Bern"}, "name": "weather"}\n</tool_call>',
            HERMES,
            [("weather", '{"city": "Bern"}')],
        ),
        (
            '<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1}"}</tool_call>',
            HERMES,
            [("weather", '{"city": 1}')],
        ),
    ],
)
def test_calls_are_read_as_the_model_wrote_them(
    text: str, dialect: Dialect, calls: Calls, size: int
) -> None:
    assert read(text, dialect, size) == ("", calls)


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("", HERMES),
        ("Hello", HERMES),
        (f"Certainly: {CALL}", LLAMA3),
        ("<tool_call></tool_call>", HERMES),
        ("<tool_call>none", HERMES),
        ("[TOOL_CALLS]none", MISTRAL),
        ("<tool_calls>", HERMES),
        ('<tool_call>\n{"foo": bad} and the rest {"of": ["it', HERMES),
        ('<tool_call>\n[{"foo": "bad} and the rest', HERMES),
        ('<tool_call>{"arguments": {}, "name": ["weather"]}</tool_call>', HERMES),
        ('<tool_call>{"arguments": {}, "name": {"weather": 1}}</tool_call>', HERMES),
        ('<tool_call>{"name": "wea', HERMES),
        ("[TOOL_CALLS]weather", MISTRAL),
        (f"<tool_call>none <tool_call>{{bad}} {CALL}", HERMES),
        ("[]", LLAMA3),
        ("{}", LLAMA3),
        ("[1, 2]", MISTRAL_LIST),
        (CALL.replace("weather", "forecast"), LLAMA3),
        (f"<tool_call>{CALL.replace('weather', 'forecast')}</tool_call>", HERMES),
        (CALL.replace('{"city": "Bern", "days": 2.50}', '"Bern"'), LLAMA3),
        ('{"name": "weather"}', LLAMA3),
        ('{"name": "weather", "type": "tool", "parameters": {}}', LLAMA3),
        ('{"name": "wea', LLAMA3),
    ],
)
def test_any_other_text_is_text(text: str, dialect: Dialect, size: int) -> None:
    assert read(text, dialect, size) == (text, [])


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("dialect", [HERMES, MISTRAL, GRANITE, PHI], ids=lambda d: d.name)
def test_text_before_the_calls_is_text_and_text_behind_them_is_dropped(
    dialect: Dialect, size: int
) -> None:
    text = f"Let me look.\n{dialect.write(TWO)}\nIt rains. {{}}"
    assert read(text, dialect, size) == ("Let me look.\n", TWO)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_no_part_of_a_call_that_is_cut_off_is_text(dialect: Dialect) -> None:
    text = dialect.write(TWO)
    begins = len(dialect.write(ONE[:1])) if dialect.each else text.index("weather_now")
    for end in range(len(text)):
        shown, calls = read(text[:end], dialect, 4, tool_choice="required")
        assert shown == ""
        assert calls == TWO[: len(calls)]
        if end >= begins:
            assert len(calls) >= 1


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ('<tool_call>\n{"name": "weather"', HERMES),
        ("[TOOL_CALLS]weather[ARGS]", MISTRAL),
        ("[TOOL_CALLS]weather[CALL_ID]a1", MISTRAL),
    ],
)
def test_no_part_of_a_call_is_text_once_it_has_its_name(text: str, dialect: Dialect) -> None:
    assert read(text, dialect, 1) == ("", [])


def test_text_that_was_no_call_does_not_hide_the_call_behind_it() -> None:
    text = f"<tool_call>none {HERMES.write(ONE)}"
    assert read(text) == read(text, size=1) == ("<tool_call>none ", ONE)


def test_arguments_can_always_be_encoded() -> None:
    other_order = r'<tool_call>{"arguments": {"city": "Z\ud800ü"}, "name": "weather"}</tool_call>'
    assert read(other_order) == ("", [("weather", r'{"city": "Z\ud800ü"}')])


@pytest.mark.parametrize("size", [0, 99_999])
@pytest.mark.parametrize(
    "call",
    ['{"name": "weather", "arguments": %s}', '{"arguments": %s, "name": "weather"}'],
)
def test_a_call_with_too_long_arguments_counts_as_cut_off(call: str, size: int) -> None:
    def answer(chars: int) -> str:
        arguments = json.dumps({"city": "B" * (chars - len('{"city": ""}'))})
        return HERMES.write(ONE) + f"<tool_call>{call % arguments}</tool_call>" + HERMES.write(ONE)

    assert [name for name, _ in read(answer(MAX_ARGUMENTS_CHARS), size=size)[1]] == ["weather"] * 3
    assert read(answer(MAX_ARGUMENTS_CHARS + 1), size=size) == ("", ONE)


@pytest.mark.parametrize("size", [0, 3, 1000])
@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        (" " * 20_000, HERMES),
        ("{" + " " * 20_000, HERMES),
        ("<tool_call>" + " " * 20_000 + CALL, HERMES),
        ("<tool_call>" + "[" * 20_000, HERMES),
        ("[TOOL_CALLS]weather[CALL_ID]" + "a" * 20_000, MISTRAL),
    ],
)
def test_what_is_long_and_no_call_yet_is_text(text: str, dialect: Dialect, size: int) -> None:
    assert read(text, dialect, size) == (text, [])
    reading = reader(dialect)
    for char in text[: 2 * LONGEST_HEAD_CHARS]:
        reading.push(char)
    assert reading.push("a") == "a"


def test_an_object_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    def loads(text: str) -> Any:
        decoded.append(len(text))
        return json.JSONDecoder().decode(text)

    monkeypatch.setattr("llorch_worker.text.calls.json.loads", loads)
    answer = '{"arguments": {"a": [' + "{}, " * 50_000 + '{}]}, "name": "weather"}'
    assert len(read(f"<tool_call>{answer}</tool_call>", size=4)[1]) == 1
    assert decoded == [len(answer)]


def test_arguments_come_as_they_are_written() -> None:
    reading = reader(LLAMA3)
    sent = []
    for piece in ('{"name": "weather", ', '"parameters": ', '{"city": "B', 'ern"', "}", "}"):
        assert reading.push(piece) == ""
        sent.append("".join(part.arguments for part in reading.take()))
    assert sent == ["", "", '{"city": "B', 'ern"', "}", ""]


@pytest.mark.parametrize(
    ("text", "shown_from"),
    [("Hello", 1), ('{"answer": 3}', 3), ('{"name": "Bern"}', 11), ("<b>", 2), ("[1]", 2)],
)
def test_other_text_is_shown_as_soon_as_it_is_no_call(text: str, shown_from: int) -> None:
    reading = reader()
    shown = [bool(reading.push(char)) for char in text]
    assert shown == [False] * (shown_from - 1) + [True] * (len(text) - shown_from + 1)


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}])
def test_a_request_that_asks_for_no_call_gets_none(fields: dict[str, Any]) -> None:
    assert reader_of(asking(**fields), HERMES, "job", 0) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ],
)
def test_only_the_first_call_counts_where_one_is_asked_for(fields: dict[str, Any]) -> None:
    for dialect in DIALECTS:
        assert read(dialect.write(TWO), dialect, 1, **fields) == ("", ONE)


def test_ids_depend_on_job_choice_and_place_alone() -> None:
    def ids(job_id: str, choice: int) -> list[str]:
        made = reader_of(asking(), LLAMA3, job_id, choice)
        assert made is not None
        made.push(f"{CALL}; {CALL}")
        return [call.id for call in made.calls]

    places = [("job", 0), ("job", 1), ("other", 0)]
    assert len({each for place in places for each in ids(*place)}) == 6
    assert ids("job", 0) == ids("job", 0)


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
    dialect=st.sampled_from(DIALECTS),
    size=st.integers(1, 40),
)
def test_whatever_calls_are_written_are_read(
    calls: list[tuple[str, dict[str, Any]]], dialect: Dialect, size: int
) -> None:
    spelt = [(name, json.dumps(arguments)) for name, arguments in calls]
    assert read(dialect.write(spelt), dialect, size) == ("", spelt)


@given(
    text=st.text(alphabet='{}[]":,; \nnametypwhrfuciopdl</|_>0ARGS'),
    dialect=st.sampled_from(DIALECTS),
    size=st.integers(1, 9),
)
def test_pieces_say_what_the_whole_says(text: str, dialect: Dialect, size: int) -> None:
    assert read(text, dialect, size) == read(text, dialect)


@pytest.mark.parametrize(
    ("shows", "dialect"),
    [
        ('{"name": "x", "parameters": {}}', LLAMA3),
        ("<tool_call>", HERMES),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] ", MISTRAL_LIST),
        ("[TOOL_CALLS]x[ARGS]", MISTRAL),
        ("<|tool|> <|/tool|> <|tool_call|>", PHI),
        ("<|tool_call|>", GRANITE),
    ],
)
def test_a_template_says_its_dialect(shows: str, dialect: Dialect) -> None:
    assert dialect_of(shows) is dialect
