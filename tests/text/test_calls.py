"""Calls of tools are read as each dialect writes them, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.tools import MAX_ARGUMENTS_CHARS
from llorch_worker.text.calls import LONGEST_HEAD_CHARS, UNSURE_CHARS, CallReader, reader_of
from llorch_worker.text.dialects import (
    DIALECTS,
    GENERIC,
    GRANITE,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_LIST,
    OLMO3,
    PHI,
    Dialect,
    dialect_of,
)
from llorch_worker.text.json_scanner import JsonScanner

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "weather_now"}},
]
CALL = '{"name": "weather", "parameters": {"city": "Bern", "days": 2.5}}'
OTHER = '{"name": "weather_now", "parameters": {}}'
ONE = [("weather", '{"city": "Bern", "days": 2.5}')]
TWO = [*ONE, ("weather_now", "{}")]
NONE = [("weather", "{}")]
ARGUMENTS_FIRST = '{"arguments": {}, "name": "weather_now"}'
ID_FIRST = '{"id": "call_1", "type": "function", "name": "weather_now", "arguments": {}}'
WITH_LISTS = (PHI, GRANITE, MISTRAL_LIST, HERMES)
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
            [("weather", '{"city":"Bern"\n,\n"days":2.5}')],
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
        # The keys of each call in their own order
        *((f"{d.mark}[{CALL}, {ARGUMENTS_FIRST}]", d, TWO) for d in WITH_LISTS),
        *((f"{d.mark}[{ID_FIRST}, {CALL}]", d, TWO[::-1]) for d in WITH_LISTS),
        *((f"{d.mark}{ARGUMENTS_FIRST}\n{ID_FIRST}", d, 2 * TWO[1:]) for d in WITH_LISTS),
        (f"[{ID_FIRST},{ARGUMENTS_FIRST}]", LLAMA3, 2 * TWO[1:]),
        (f'{{"tool_calls": [{ID_FIRST}, {CALL}]}}', GENERIC, TWO[::-1]),
        # In fences
        (f"```json\n{CALL}\n```", HERMES, ONE),
        (f"\n```\n[{CALL},\n{OTHER}]\n```\n", HERMES, TWO),
        (f"```json\n{CALL}\n```\n\n```json\n{ID_FIRST}\n```", HERMES, TWO),
        (f"```xml\n<tool_call>\n{CALL}\n</tool_call>\n```", HERMES, ONE),
        (f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>", HERMES, ONE),
        (f"```tool_call\n{CALL}\n```", GENERIC, ONE),
        (f"<tools>\n{CALL}\n</tools>\n<tools>{ID_FIRST}</tools>", HERMES, TWO),
        # Without arguments
        ('{"name": "weather"}', LLAMA3, [("weather", "{}")]),
        ('<tool_call>{"name": "weather" , "arguments" : null}</tool_call>', HERMES, NONE),
        ('<tool_call>{"arguments": null, "name": "weather"}</tool_call>', HERMES, NONE),
        ('<tool_call>{"id": 7, "name": "weather", "arguments": ""}</tool_call>', HERMES, NONE),
        (f'[{{"name": "weather"}}, {CALL}]', GRANITE, NONE + ONE),
        ("<function_calls>weather()</function_calls>", OLMO3, NONE),
        # Wrapped
        (f'{{"type": "function", "function": {CALL}}}', LLAMA3, ONE),
        (f'[{{"id": "a", "type": "function", "function": {CALL}}}, {OTHER}]', LLAMA3, TWO),
        (f'<tool_call>{{"function": {CALL}, "id": 1}}</tool_call>', HERMES, ONE),
        (f'{{"tool_calls": [{{"type": "function", "function": {CALL}}}]}}', GENERIC, ONE),
        ('{"function": "weather", "arguments": {}}', LLAMA3, NONE),
        # Untidy
        (f"<tool_call>{CALL[:-1]},}}</tool_call><tool_call>{OTHER}</tool_call>", HERMES, TWO),
        (f"<tool_call>{CALL}\n{OTHER}", HERMES, TWO),
        ('<tool_call>{"thought": [{}], "name": "weather", "arguments": {}}', HERMES, NONE),
        ("[TOOL_CALLS]weather{}", MISTRAL, NONE),
        # As Python writes them
        (
            "<function_calls>\nweather(city='Bern', days=2.5,)\nweather_now()\n</function_calls>",
            OLMO3,
            TWO,
        ),
        (
            """<function_calls>weather(a=[True, None, 'it\\'s "b")'], c={'d': false})""",
            OLMO3,
            [("weather", r"""{"a": [true, null, "it's \"b\")"], "c": {"d": false}}""")],
        ),
        (f"<function_calls>{CALL}\nweather_now()</function_calls>", OLMO3, TWO),
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
        (CALL.replace('{"city": "Bern", "days": 2.5}', '"Bern"'), LLAMA3),
        ('{"name": "weather", "type": "tool", "parameters": {}}', LLAMA3),
        ('{"name": "wea', LLAMA3),
        # Arguments that are no JSON, or no object
        *(
            (f'{mark}{{"name": "weather", "arguments": {arguments}}}{HERMES.end_mark}', HERMES)
            for mark in ("", HERMES.mark)
            for arguments in (
                *("{'city': 'Bern'}", '{"city": "Bern",}', "{city: 1}", '{"city": True}'),
                *('{"a": NaN}', '{"a": "\n"}', "[]", "3", '"Bern"', '"[]"', '"{}}"'),
            )
        ),
        ('<tool_call>{"arguments": {"a": 1,}, "name": "weather"}', HERMES),
        ("[TOOL_CALLS]weather[ARGS]{'city': 1}", MISTRAL),
        ("<function_calls>weather('Bern')</function_calls>", OLMO3),
        ("<function_calls>weather(city=today())</function_calls>", OLMO3),
        ("<function_calls>weather(city=1, city)</function_calls>", OLMO3),
        ("<function_calls>forecast(city='Bern')</function_calls>", OLMO3),
        ("weather(city='Bern')", OLMO3),
        # Nor is this a call
        ('```json\n{"id": 1, "city": "Bern"}\n```', HERMES),
        ("```python\nprint(1)\n```\nDone.", HERMES),
        ("It is `a` or ``b``.", HERMES),
        ("```", HERMES),
        ('{"id": 1, "name": "Bern"}', HERMES),
        ('{"function": {"function": {"name": "weather"}}}', LLAMA3),
        ('{"tool_calls": []}', GENERIC),
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
    text = f"Let me look.\n```json\n[{CALL}, {OTHER}]\n```\nIt rains."
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


@pytest.mark.parametrize("keys", ["first", "last"])
def test_arguments_are_looked_at_once(monkeypatch: pytest.MonkeyPatch, keys: str) -> None:
    looked_at = []

    class Scanner(JsonScanner):
        def feed(self, text: str, at: int = 0) -> int | None:
            looked_at.append(len(text) - at)
            return super().feed(text, at)

    monkeypatch.setattr("llorch_worker.text.calls.JsonScanner", Scanner)
    arguments = '{"a": [' + "{}, " * 50_000 + "{}]}"
    answer = f'{{"arguments": {arguments}, "name": "weather"}}'
    if keys == "last":
        answer = f'{{"name": "weather", "arguments": {arguments}}}'
    assert len(read(f"<tool_call>{answer}</tool_call>", size=4)[1]) == 1
    assert sum(looked_at) < len(answer) + 100


def test_broken_arguments_do_not_hide_the_call_behind_them() -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"a": 1,}}</tool_call>'
    text = broken + HERMES.write(ONE)
    assert read(text) == read(text, size=1) == (broken, ONE)
    assert read(HERMES.write(ONE) + text) == read(HERMES.write(ONE) + text, size=1) == ("", ONE * 2)


def test_a_call_whose_arguments_break_late_counts_as_cut_off() -> None:
    def answer(chars: int) -> str:
        arguments = '{"a": "' + "b" * (chars - len('{"a": ""')) + '"'
        assert len(arguments) == chars
        return f'Hm. <tool_call>{{"name": "weather", "arguments": {arguments}!}}</tool_call>'

    for size in (0, 1, 7, 2000):
        for chars, text in ((UNSURE_CHARS, answer(UNSURE_CHARS)), (UNSURE_CHARS + 1, "Hm. ")):
            assert read(answer(chars), size=size) == (text, [])
        text = answer(UNSURE_CHARS + 1) + HERMES.write(ONE)
        assert read(HERMES.write(TWO) + text, size=size) == ("", TWO)


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"tool_choice": "required"}, ["", "", '{"city": "B', "ern", '"', "}", ""]),
        # Nothing holds them to JSON.
        ({}, ["", "", "", "", "", '{"city": "Bern"}', ""]),
    ],
)
def test_arguments_come_as_they_are_written(fields: dict[str, Any], sent: list[str]) -> None:
    reading = reader(LLAMA3, **fields)
    pieces = ('{"name": "weather", ', '"parameters": ', '{"city": "B', "ern", '"', "}", "}")
    for piece, expected in zip(pieces, sent, strict=True):
        assert reading.push(piece) == ""
        assert "".join(part.arguments for part in reading.take()) == expected


def test_long_arguments_come_as_they_are_written() -> None:
    reading = reader(LLAMA3)
    reading.push('{"name": "weather", "parameters": {"city": "' + "B" * (UNSURE_CHARS - 10))
    assert reading.take() == ()
    reading.push("B" * 9)
    assert sum(len(part.arguments) for part in reading.take()) == UNSURE_CHARS + 9
    reading.push("ern")
    assert [part.arguments for part in reading.take()] == ["ern"]


@pytest.mark.parametrize(
    ("text", "shown_from"),
    [
        ("Hello", 1),
        ('{"answer": 3}', 4),
        ('{"city": 3}', 3),
        ('{"name": "Bern"}', 11),
        ("<b>", 2),
        ("[1]", 2),
    ],
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


NAMES = st.from_regex("[a-z_][a-z0-9_]{0,9}", fullmatch=True)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=4,
)


def written(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    call = st.tuples(st.sampled_from(["weather", "weather_now"]), st.dictionaries(names, JSON))
    return st.lists(call, min_size=1, max_size=4)


WRITTEN = {dialect.name: written(NAMES if dialect.keywords else st.text()) for dialect in DIALECTS}


@settings(max_examples=60, deadline=None)
@given(dialect=st.sampled_from(DIALECTS), size=st.integers(1, 40), data=st.data())
def test_whatever_calls_are_written_are_read(
    dialect: Dialect, size: int, data: st.DataObject
) -> None:
    calls = data.draw(WRITTEN[dialect.name])
    spelt = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    assert read(dialect.write(spelt), dialect, size) == ("", spelt)


@given(
    text=st.text(alphabet='{}[]":,; \nnametypwhrfuciopdl</|_>0ARGS'),
    dialect=st.sampled_from(DIALECTS),
    size=st.integers(1, 9),
)
def test_pieces_say_what_the_whole_says(text: str, dialect: Dialect, size: int) -> None:
    assert read(text, dialect, size) == read(text, dialect)


PARTS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<function_calls>"),
    *("```json\n", "```", "[", "]", "{", "}", "(", ")", ",", ":", "=", '"', "'", "\\", "\n", " "),
    *("weather", '"weather"', '"name"', '"arguments"', '"parameters"', '"id"', '"type"', "null"),
    *('"function"', '"tool_calls"', "{}", '{"a": 1}', '"{}"', "1", "true", "city='b'", "text"),
    *(CALL, OTHER, ARGUMENTS_FIRST, ID_FIRST, CALL[:-1], '{"name": "weather", "arguments": '),
)


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    dialect=st.sampled_from(DIALECTS),
    size=st.integers(1, 9),
    fields=st.sampled_from([{}, {"tool_choice": "required"}, {"parallel_tool_calls": False}]),
)
def test_pieces_of_calls_say_what_the_whole_says(
    text: str, dialect: Dialect, size: int, fields: dict[str, Any]
) -> None:
    shown, calls = read(text, dialect, **fields)
    assert read(text, dialect, size, **fields) == (shown, calls)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    if not calls:
        assert text.startswith(shown) or "tool_choice" in fields


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
