"""What of a schema no grammar holds is relaxed in it, and checked on the finished text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from llorch_worker.contract import Choice, InvalidRequest
from llorch_worker.engine import Engine
from llorch_worker.intake.constraints import schema_check
from llorch_worker.intake.constraints.compiler import Compiler
from llorch_worker.intake.constraints.grammar import grammar_of
from llorch_worker.intake.constraints.relaxed import Checks, Relaxed, longest_held, misspelt, relax
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary
from tests.engine.structured import TIMEOUT_S, asking
from tests.engine.test_tools import Form
from tests.engine.test_tools import asking as asking_for_a_call

OBJECT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
CLOSED = {**OBJECT, "additionalProperties": False}
TWINS = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}


def choice_of(engine: Engine, schema: dict[str, Any], seed: int = 1) -> Choice:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (choice,) = engine.submit(asking(response_format=shape, seed=seed)).result(TIMEOUT_S).choices
    assert choice.finish_reason == "stop"
    return choice


@pytest.mark.parametrize(
    "rules",
    [
        {"propertyNames": {"pattern": "^[a-z]$"}},
        {"not": {"required": ["b"]}},
        {"if": {"required": ["b"]}, "then": {"required": ["c"]}},
        {"dependentRequired": {"b": ["c"]}},
        {"dependentSchemas": {"b": {"required": ["c"]}}},
        {"minProperties": 1, "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [1]}}},
        {"unevaluatedProperties": False},
        {"properties": {"a": {"type": "string", "format": "binary", "maxLength": 2}}},
        {"properties": {"a": {"enum": ["/{x}"], "format": "uri-template"}}},
        {"properties": {"a": {"oneOf": [{"enum": [1, 2]}, {"enum": [3, "x"]}]}}},
        {"properties": {"a": {**TWINS, "uniqueItems": False}}},
        {"properties": {"a": {"type": "array", "contains": {"const": 1}, "items": {"const": 1},
                              "minItems": 1, "maxItems": 2}}},
    ],
    ids=lambda rules: next(iter(rules)),
)  # fmt: skip
def test_schemas_of_ordinary_tools_compile(engine: Engine, rules: dict[str, Any]) -> None:
    choice = choice_of(engine, {**CLOSED, **rules})
    assert isinstance(json.loads(choice.text), dict)
    assert choice.unmet is None


def test_what_the_text_breaks_is_said(engine: Engine) -> None:
    assert choice_of(engine, TWINS).unmet == (": uniqueItems",)
    assert choice_of(engine, {**CLOSED, "properties": {"a": TWINS}}).unmet == ("/a: uniqueItems",)
    either = {"oneOf": [{"const": 1}, {"enum": [1]}]}
    assert choice_of(engine, either).unmet == (": oneOf",)


def test_what_the_arguments_of_a_call_break_is_said(engine: Engine) -> None:
    tool = {"function": {"name": "f", "parameters": {**CLOSED, "properties": {"a": TWINS}}}}
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    request = asking_for_a_call(**fields, max_tokens=100)
    (choice,) = engine.submit(request).result(TIMEOUT_S).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.unmet == ("tool_calls.0/a: uniqueItems",)


def test_strict_refuses_what_no_grammar_holds(engine: Engine) -> None:
    outputs = {"json": TWINS, "strict": True}
    with pytest.raises(InvalidRequest, match="must have no uniqueItems with strict"):
        engine.submit(asking(structured_outputs=outputs))
    held = {"json": CLOSED, "strict": True}
    assert engine.submit(asking(structured_outputs=held)).result(TIMEOUT_S)


LONG = "Съешь же ещё этих мягких французских булок, да выпей чаю.\n" * 200


def strings(limits: Iterable[int]) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string", "maxLength": n} for i, n in enumerate(limits)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def write(loaded: Any, schema: dict[str, Any], text: str) -> None:
    """Writes ``text`` by the grammar of ``schema``."""
    tokenizer = loaded.tokenizer
    vocabulary = ConstraintVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    matcher = Compiler(vocabulary).compile(asking(structured_outputs={"json": schema}))
    assert matcher is not None
    for token_id in tokenizer.encode_inside(text):
        matcher.ll_matcher.compute_bitmask()
        matcher.push(token_id)


@pytest.mark.parametrize("limits", [[5000], range(500, 510), [2000] * 3], ids=str)
def test_a_text_as_long_as_its_schema_lets_it_be_fits_the_lexer(
    loaded: Any, limits: Sequence[int]
) -> None:
    whole = json.dumps({f"p{i}": LONG[:n] for i, n in enumerate(limits)}, ensure_ascii=False)
    write(loaded, strings(limits), whole)


def test_lengths_beyond_the_lexer_are_checked_on_the_whole_text() -> None:
    schema = {"type": "string", "minLength": 1, "maxLength": 5000}
    assert relax(schema).keywords == ("maxLength",)
    assert relax(schema).schema == {"type": "string", "minLength": 1}
    texts = [json.dumps("a" * n) for n in (5000, 5001)]
    assert Checks(schema, {}).unmet([(text, ()) for text in texts]) == [(), (": maxLength",)]
    assert relax(strings([255] * 50 + [1000])).keywords == ()
    assert longest_held([strings([700]), strings([600, 800])]) == 700
    both = [{"type": "string", "minLength": 200 + i, "maxLength": 1000 + i} for i in range(20)]
    assert longest_held([{"prefixItems": both}]) < 210


def test_lengths_refuse_no_schema_that_cannot_be_checked() -> None:
    def checks(**schema: Any) -> object:
        request = asking(structured_outputs={"json": {"type": "string", **schema}})
        grammar = grammar_of(request, Form)
        assert grammar is not None
        return grammar.checks

    assert checks(maxLength=5000, title="x") is not None
    assert checks(maxLength=5000, title=None) is None
    with pytest.raises(InvalidRequest, match="no valid JSON Schema"):
        checks(maxLength=5000, title=None, **{"not": {"const": "x"}})


EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
"""zod's."""


def test_a_pattern_with_look_around_is_checked_on_the_whole_text(engine: Engine) -> None:
    address = {"type": "string", "format": "email", "pattern": EMAIL}
    assert relax(address) == Relaxed({"type": "string", "format": "email"}, ("pattern",))
    escaped = {"pattern": r"^a\(?=\\$"}
    assert relax(escaped) == Relaxed(escaped, ())
    texts = [json.dumps(f"{name}@b.example") for name in ("a.a", "a..a", ".a")]
    found = [(), (": pattern",), (": pattern",)]
    assert Checks({"pattern": EMAIL}, {}).unmet([(text, ()) for text in texts]) == found
    enum = {"enum": ["a..a@b.example"], "pattern": EMAIL}
    choice = choice_of(engine, {**CLOSED, "properties": {"a": enum}})
    assert choice.unmet == ("/a: pattern",)
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": address}}}}]
    assert engine.submit(asking_for_a_call(tools=tools, max_tokens=2)).result(TIMEOUT_S)


def test_keys_with_look_around_are_checked_on_the_whole_text(loaded: Any) -> None:
    schema = {
        "type": "object",
        "patternProperties": {"^(?!b).$": {"enum": [1, 2]}, "^c": {"enum": [3]}},
        "additionalProperties": False,
    }
    assert relax(schema).keywords == ("patternProperties",)
    assert relax(schema).schema == {
        "type": "object",
        "patternProperties": {"^c": {"enum": [3]}},
        "additionalProperties": {"anyOf": [{"enum": [1, 2]}, False]},
    }
    write(loaded, schema, '{"a": 1, "c": 3}')
    with pytest.raises(InvalidRequest):
        write(loaded, schema, '{"a": 3}')
    texts = ['{"a": 1}', '{"a": 3}', '{"b": 1}']
    found = [(), ("/a: enum",), (": additionalProperties",)]
    assert Checks(schema, {}).unmet([(text, ()) for text in texts]) == found


def test_a_pattern_that_backtracks_without_end_stops_nobody() -> None:
    checks = Checks({"pattern": "^(?=(a+)+$)(a|a)+$"}, {})
    (unmet,) = checks.unmet([(json.dumps("a" * 200 + "b"), ())])
    assert unmet


def test_a_schema_that_is_none_by_its_draft_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="is no valid JSON Schema"):
        choice_of(engine, {"type": "array", "uniqueItems": "zsecretz"})


@pytest.mark.parametrize(
    ("word", "keyword"),
    [("maxlength", "maxLength"), ("min_length", "minLength"), ("requierd", "required")],
)
def test_a_misspelt_keyword_is_named(engine: Engine, word: str, keyword: str) -> None:
    schema = {**CLOSED, "properties": {"a": {"type": "string", word: 3}}}
    with pytest.raises(InvalidRequest, match=f"has no keyword .?{word}.?: is it {keyword}"):
        choice_of(engine, schema)


def test_names_and_other_words_are_no_misspelt_keywords() -> None:
    words = (
        "title description default example examples deprecated readOnly nullable discriminator "
        "xml externalDocs contentEncoding contentMediaType enumNames propertyOrdering x-order "
        "x-format $schema $id $comment $anchor"
    )
    schema = {"properties": {"maxlength": {}}, "enum": [{"requierd": 1}]}
    assert misspelt({**schema, **dict.fromkeys(words.split(), "x")}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"^x$": {"enum": [1]}}, "required": ["x"]},
        {"properties": {"x": {}, "y": {}}, "patternProperties": {"^[xy]$": {"enum": [1]}}},
        {"properties": {"x": {"enum": [1, 2]}}, "patternProperties": {"^x$": {"enum": [1]}}},
    ],
    ids=["required", "two", "both"],
)
def test_a_pattern_whose_keys_are_all_named_is_no_dead_end(
    engine: Engine, schema: dict[str, Any]
) -> None:
    closed = {"type": "object", "additionalProperties": False, **schema}
    (comma,) = engine.tokenizer.encode("x,", add_special_tokens=False)[-1:]
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": closed}}
    fields = {"response_format": shape, "logit_bias": {comma: 100}}
    together = [engine.submit(asking(**fields, seed=seed)) for seed in range(4)]
    for generation in together:
        (choice,) = generation.result(TIMEOUT_S).choices
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.text).values()) <= {1}


def test_a_pattern_with_more_keys_stays() -> None:
    schema = {
        "properties": {"x": {}},
        "patternProperties": {"^[xy]$": {}, "^z": {}},
        "additionalProperties": False,
    }
    assert relax(schema).schema == schema


def test_patterns_are_checked_in_linear_time() -> None:
    checks = Checks({"not": {"pattern": "^(a+)+$"}}, {})
    texts = [json.dumps("a" * 100_000 + "b"), json.dumps("a" * 100_000)]
    assert checks.unmet([(text, ()) for text in texts]) == [(), (": not",)]


def test_a_check_that_takes_too_long_is_given_up_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schema_check, "LIMIT_S", 1.0)
    twice = {f"d{n}": {"allOf": 2 * [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(40)}
    checks = Checks({"not": {"$ref": "#/$defs/d0"}, "$defs": {**twice, "d40": {}}}, {})
    assert checks.unmet(3 * [("1", ())]) == 3 * [(": not checked, because it takes too long",)]


def test_what_was_found_before_a_check_is_given_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*command: Any, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, 5.0, output=b'[]\n[": uniqueItems"]\n[": uni')

    monkeypatch.setattr(subprocess, "run", stops)
    unmet = Checks({"uniqueItems": True}, {}).unmet(4 * [("[1]", ())])
    assert unmet == [(), (": uniqueItems",), *2 * [(": not checked, because it takes too long",)]]


@pytest.mark.parametrize(
    ("executable", "why"),
    [
        ("/nowhere/python", "no process can start: No such file or directory"),
        ("/bin/false", "the check failed"),
    ],
)
def test_a_finished_text_that_cannot_be_checked_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, executable: str, why: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    checks = Checks({"uniqueItems": True}, {})
    assert checks.unmet(2 * [("[1]", ())]) == 2 * [(f": not checked, because {why}",)]


@pytest.mark.parametrize(
    "schema",
    [
        {"format": []},
        {"minProperties": 1, "properties": 5},
        {"minProperties": 1, "required": [[]], "properties": {"a": {}}},
    ],
)
def test_values_of_the_wrong_type_are_refused(engine: Engine, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        choice_of(engine, schema)
