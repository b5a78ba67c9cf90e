"""Calls of tools: forced by a grammar, or read from what the model chose to write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import (
    GenerationRequest,
    GenerationResult,
    InvalidRequest,
    Tokens,
    read_journal,
)
from llorch_worker.engine import Engine
from llorch_worker.intake.constraints.grammar import grammar_of
from llorch_worker.model import RaggedBatch
from llorch_worker.text.chat import TemplateChat
from llorch_worker.text.chat_templates import ChatTemplates
from llorch_worker.text.dialects import DIALECTS, LLAMA3, OLMO3, Dialect
from tests.engine.structured import TIMEOUT_S

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zürich"]}, "days": {"enum": [1, 2, 7]}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"unused": {"type": "null"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
# Like Llama 3.x': it shows tools, and calls as they are to be written.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %}\n{% endfor %}"
)


@pytest.fixture
def with_template(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = ChatTemplates({"default": TEMPLATE}, {})
    chat = TemplateChat(templates, loaded.tokenizer._codec, None)
    monkeypatch.setattr(loaded.tokenizer, "_chat", chat)


def asking(**fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "Weather?"}]
    given = {"messages": messages, "tools": TOOLS, "max_tokens": 200, "seed": 1, **fields}
    return GenerationRequest(**given)


@pytest.mark.usefixtures("with_template")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("tool_choice", "allowed"),
    [
        ("required", {"weather", "time"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ({"type": "function", "function": {"name": "time"}}, {"time"}),
    ],
    ids=["required", "weather", "time"],
)
def test_a_forced_call_fits_its_tool(
    engine: Engine, tool_choice: Any, allowed: set[str], seed: int
) -> None:
    fields = {"tool_choice": tool_choice, "seed": seed, "parallel_tool_calls": False}
    (choice,) = engine.submit(asking(**fields)).result(TIMEOUT_S).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.tool_calls is not None
    (call,) = choice.tool_calls
    assert call.function.name in allowed
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        Draft202012Validator(WEATHER).validate(arguments)
    else:
        assert arguments == {}


@pytest.mark.usefixtures("with_template")
def test_forced_calls_may_be_several(engine: Engine, loaded: Any) -> None:
    (go_on,) = loaded.tokenizer.encode("x;", add_special_tokens=False)[-1:]
    fields = {"tool_choice": "required", "logit_bias": {go_on: 50}, "max_tokens": 120}
    (choice,) = engine.submit(asking(**fields)).result(TIMEOUT_S).choices
    assert choice.text == ""
    assert len(choice.tool_calls or ()) > 1


@pytest.mark.usefixtures("with_template")
def test_a_named_function_is_called_once(engine: Engine, loaded: Any) -> None:
    (go_on,) = loaded.tokenizer.encode("x;", add_special_tokens=False)[-1:]
    named = {"type": "function", "function": {"name": "time"}}
    fields = {"tool_choice": named, "logit_bias": {go_on: 50}, "max_tokens": 120}
    (choice,) = engine.submit(asking(**fields)).result(TIMEOUT_S).choices
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.tool_calls or ()] == ["time"]


@pytest.mark.usefixtures("with_template")
@pytest.mark.parametrize("kinds", [["object", "null"], ["null", "object", "array"], "object"])
def test_arguments_are_an_object_whatever_else_a_schema_takes(engine: Engine, kinds: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": kinds}}}
    named = {"type": "function", "function": {"name": "weather"}}
    fields = {"tools": [tool], "tool_choice": named, "max_tokens": 400}
    together = [engine.submit(asking(**fields, seed=seed)) for seed in range(4)]
    for generation in together:
        (choice,) = generation.result(TIMEOUT_S).choices
        if choice.finish_reason != "length":
            (call,) = choice.tool_calls or ()
            assert isinstance(json.loads(call.function.arguments), dict)


@pytest.mark.parametrize(
    ("parameters", "calls", "others"),
    [
        (
            WEATHER,
            ('weather(city="Bern", days=2)', 'weather(city="Bern")'),
            ("weather()", "weather(days=2)", 'weather(days=2, city="Bern")', "weather(city=1)"),
        ),
        (
            {"properties": {"a": True, "b": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"const": 1}}},
            ("weather()", "weather(a=[null])", "weather(b=1)", 'weather(a="x", b=1)'),
            ("weather(b=2)", "weather(a=[null],b=1)", "weather(, b=1)"),
        ),
        (None, ("weather()",), ("weather(a=1)", '{"name": "weather", "arguments": {}}')),
        # Keywords cannot say these.
        (
            {"properties": {"a-b": {}}},
            ('{"name": "weather", "arguments": {"a-b": 1}}',),
            ("weather(a-b=1)", "weather()"),
        ),
        ({"type": "object"}, ('{"name": "weather", "arguments": {"x": 1}}',), ("weather()",)),
        # Nor can a property alone, if its reference means the whole schema.
        (
            {"properties": {"a": {"const": 1}, "b": {"$ref": "#/properties/a"}}},
            ('{"name": "weather", "arguments": {"a": 1, "b": 1}}',),
            ("weather(a=1, b=1)", '{"name": "weather", "arguments": {"b": 2}}'),
        ),
        (
            {"properties": {"a": {"type": "object", "properties": {"b": {"$ref": "#"}}}}},
            ('{"name": "weather", "arguments": {"a": {"b": {"a": {}}}}}',),
            ("weather(a={})", '{"name": "weather", "arguments": {"a": {"b": {"a": 1}}}}'),
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/b"}, "c": {"const": 1}},
                "$defs": {"b": {"type": "array", "items": {"$ref": "#/properties/c"}}},
            },
            ('{"name": "weather", "arguments": {"a": [1], "c": 1}}',),
            ("weather(a=[1])", '{"name": "weather", "arguments": {"a": [2]}}'),
        ),
        (
            {
                "properties": {"a": {"items": {"$ref": "#/$defs/b"}, "$defs": {"c": {}}}},
                "$defs": {"b": {"const": 1}},
            },
            ('{"name": "weather", "arguments": {"a": [1]}}',),
            ("weather(a=[1])", '{"name": "weather", "arguments": {"a": [2]}}'),
        ),
        # A property may be called like the keyword.
        (
            {"properties": {"a": {"properties": {"$ref": {"const": 1}}}}},
            ('weather(a={"$ref": 1})',),
            ('weather(a={"$ref": 2})',),
        ),
    ],
)
def test_forced_calls_in_pythons_form_fit_their_schema(
    parameters: Any, calls: Sequence[str], others: Sequence[str]
) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    grammar = grammar_of(asking(tools=[tool], tool_choice="required"), Form).build()
    tokenizer = LLTokenizer("byte")

    def fits(call: str) -> bool:
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        ids = tokenizer.tokenize_str(f"<function_calls>{call}\n{call}</function_calls>")
        return bool(matcher.consume_tokens(ids) and matcher.is_accepting())

    assert [call for call in calls if not fits(call)] == []
    assert [call for call in others if fits(call)] == []


class Form:
    """A model of OLMo 3's whose marks are text."""

    dialect = OLMO3
    control_ids: Mapping[str, int] = {}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_a_forced_call_is_written_in_the_models_dialect(
    engine: Engine, loaded: Any, monkeypatch: pytest.MonkeyPatch, dialect: Dialect
) -> None:
    template = TEMPLATE + "{# " + " ".join(dialect.evidence) + " #}"
    chat = TemplateChat(ChatTemplates({"default": template}, {}), loaded.tokenizer._codec, None)
    monkeypatch.setattr(loaded.tokenizer, "_chat", chat)
    expected = dialect if dialect.evidence else LLAMA3
    request = asking(tool_choice="required", parallel_tool_calls=False)
    (choice,) = engine.submit(request).result(TIMEOUT_S).choices
    (call,) = choice.tool_calls or ()
    written = loaded.tokenizer.decode(choice.token_ids)
    assert written.strip() == expected.write([(call.function.name, call.function.arguments)])


@pytest.mark.usefixtures("with_template")
def test_calls_cut_off_are_no_text_and_those_before_are_kept(engine: Engine, loaded: Any) -> None:
    (go_on,) = loaded.tokenizer.encode("x;", add_special_tokens=False)[-1:]
    for most in range(1, 80, 7):
        fields = {"tool_choice": "required", "logit_bias": {go_on: 50}, "max_tokens": most}
        generation = engine.submit(asking(**fields))
        (choice,) = generation.result(TIMEOUT_S).choices
        assert (choice.text, choice.finish_reason) == ("", "length")
        for call in choice.tool_calls or ():
            json.loads(call.function.arguments)
        events = [event for event in generation.events() if isinstance(event, Tokens)]
        parts = [part for event in events for part in event.tool_calls or ()]
        begun = sum(part.id is not None for part in parts)
        assert begun - len(choice.tool_calls or ()) in (0, 1)


@pytest.mark.usefixtures("with_template")
def test_the_ids_of_calls_survive_a_death(engine: Engine) -> None:
    request = asking(tool_choice="required", n=2, parallel_tool_calls=False)
    whole = engine.submit(request, job_id="job")
    expected = whole.result(TIMEOUT_S).choices
    tokens = [event for event in whole.events() if isinstance(event, Tokens)]
    journal = read_journal(tokens[: len(tokens) // 2])
    again = engine.submit(request, job_id="job", journal=journal)
    assert again.result(TIMEOUT_S).choices == expected
    rest = [event for event in again.events() if isinstance(event, Tokens)]
    seen = [*tokens[: len(tokens) // 2], *rest]
    for choice in expected:
        parts = [p for e in seen if e.choice == choice.index for p in e.tool_calls or ()]
        assert [part.id for part in parts if part.id] == [c.id for c in choice.tool_calls or ()]
        arguments = "".join(part.arguments for part in parts)
        assert arguments == "".join(c.function.arguments for c in choice.tool_calls or ())
    ids = {call.id for choice in expected for call in choice.tool_calls or ()}
    assert len(ids) == 2


class Says:
    """Writes given ids after the prompt, one each step."""

    def __init__(self, model: Any, prompt_tokens: int, ids: list[int]) -> None:
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.ids = ids

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        logits: torch.Tensor = self.model.forward(batch, cache)
        for row, position in enumerate(batch.positions[batch.logits_rows].tolist()):
            at = min(position + 1 - self.prompt_tokens, len(self.ids) - 1)
            logits[row, self.ids[at]] += 1e3
        return logits


@pytest.fixture
def says(
    loaded: Any, with_template: None, make_engine: Callable[..., Engine]
) -> Callable[..., GenerationResult]:
    """The result of a request that the model answers with a given text."""

    def answer(text: str, **fields: Any) -> GenerationResult:
        request = asking(**fields)
        shown = () if request.tool_choice == "none" else request.tools
        prompt = loaded.tokenizer.encode_chat(request.messages, shown)
        (end,) = loaded.tokenizer.eos_token_ids
        ids = [*loaded.tokenizer.encode_inside(text), end]
        engine = make_engine(model=Says(loaded.model, len(prompt), ids))
        return engine.submit(request).result(TIMEOUT_S)

    return answer


CALL = '{"name": "weather", "parameters": {"city": "Bern"}}'


@pytest.mark.parametrize("form", ["{}", "```json\n{}\n```", '{{"function": {}}}'])
def test_a_call_that_the_model_chose_is_read(
    says: Callable[..., GenerationResult], form: str
) -> None:
    (choice,) = says(form.format(CALL)).choices
    assert choice.text == ""
    assert choice.finish_reason == "tool_calls"
    assert choice.tool_calls is not None
    assert [call.function.arguments for call in choice.tool_calls] == ['{"city": "Bern"}']


SHAPE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["sun"]}}}


@pytest.mark.parametrize(
    "shape",
    [
        {"response_format": SHAPE},
        {"structured_outputs": {"regex": '"sun"'}},
        {"structured_outputs": {"choice": ['"sun"', "no"]}},
        {"structured_outputs": {"grammar": r'start: "\"sun\""'}},
    ],
    ids=["json", "regex", "choice", "grammar"],
)
def test_an_answer_with_a_shape_is_a_call_or_has_the_shape(
    says: Callable[..., GenerationResult], shape: dict[str, Any]
) -> None:
    (choice,) = says(CALL, **shape).choices
    assert [call.function.name for call in choice.tool_calls or ()] == ["weather"]
    (choice,) = says('"sun"', **shape).choices
    assert (choice.text, choice.tool_calls, choice.finish_reason) == ('"sun"', None, "stop")
    # A call comes first where one is asked for; its shape has the turn after it.
    (choice,) = says(CALL, tool_choice="required", **shape).choices
    assert [call.function.name for call in choice.tool_calls or ()] == ["weather"]


NUMBERED = {"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]}


@pytest.mark.parametrize(
    "shape",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": NUMBERED}},
        {"structured_outputs": {"grammar": 'root ::= "{" [^}]+ "}"'}},
    ],
    ids=["object", "json", "gbnf"],
)
def test_an_answer_with_a_shape_may_begin_like_a_call(
    says: Callable[..., GenerationResult], shape: dict[str, Any]
) -> None:
    for text in ('{"name": 5}', '{"name": 7, "parameters": "Bern"}'):
        (choice,) = says(text, **shape).choices
        assert (choice.text, choice.tool_calls, choice.finish_reason) == (text, None, "stop")
    (choice,) = says(CALL, **shape).choices
    assert [call.function.name for call in choice.tool_calls or ()] == ["weather"]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("It rains.", {}),
        (CALL, {"tool_choice": "none"}),
        (CALL.replace("weather", "forecast"), {}),
        (CALL.replace('"Bern"', "'Bern'"), {}),
    ],
    ids=["text", "none", "unknown tool", "no JSON"],
)
def test_other_answers_are_text(
    says: Callable[..., GenerationResult], text: str, fields: dict[str, Any]
) -> None:
    (choice,) = says(text, **fields).choices
    assert (choice.text, choice.finish_reason, choice.tool_calls) == (text, "stop", None)


def test_a_model_without_a_template_calls_in_the_generic_dialect(
    engine: Engine, loaded: Any
) -> None:
    request = asking(tool_choice="required", tools=TOOLS[1:], max_tokens=100)
    (choice,) = engine.submit(request).result(TIMEOUT_S).choices
    (call, *_) = choice.tool_calls or ()
    written = loaded.tokenizer.decode(choice.token_ids)
    assert written.startswith(f'{{"tool_calls": [{{"name": "{call.function.name}", "arguments": ')


@pytest.mark.usefixtures("with_template")
def test_parameters_that_do_not_compile_are_refused(engine: Engine) -> None:
    tool = {"function": {"name": "f", "parameters": {"type": "zsecretz"}}}
    with pytest.raises(InvalidRequest, match="tools: must compile") as caught:
        engine.submit(asking(tools=[tool], tool_choice="required"))
    assert "zsecretz" not in str(caught.value)
