"""The grammar that a request's text must fit, in llguidance's form."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from llorch_worker.contract import (
    GenerationRequest,
    InvalidRequest,
    NamedToolChoice,
    Tool,
    describe,
    shown,
)
from llorch_worker.intake.constraints.gbnf import ControlTokens, as_lark, is_gbnf
from llorch_worker.intake.constraints.relaxed import LENGTHS, Checks, longest_held, misspelt, relax
from llorch_worker.text.dialects import GENERIC, Dialect
from llorch_worker.text.spellings import any_of

_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrtbf\\"',
}
"""JSON on one line, as ``json.dumps`` and chat templates write it. So all but the values is forced
and needs no steps, and no weak model writes white space for ever. Each character has one spelling:
with ``\\u`` or ``\\/``, a key could pass for another than the one that it spells. A schema's own
``x-guidance`` replaces it."""


_TERMINALS = {"gbnf": ".", "json_schema": r'"[^"]*"|[:,] |.'}
"""How the text around calls is cut where an answer may also be of this kind: as that is. Of two
terminals that begin alike the longer one wins, so that the other text could not be written."""

_PLAIN = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "x-guidance", "$defs"),
        *("definitions", "$schema", "$id", "$comment", "title", "description", "examples"),
        *("default", "deprecated", "strict"),
    }
)
_SHARED = ("x-guidance", "$defs", "definitions")
"""What goes with the schema of each property, which is a grammar of its own."""


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar in llguidance's terms, as a document."""

    field: str
    """Of the request."""
    text: str
    is_users_own: bool = False
    """Whether the user wrote its rules, which may be ambiguous without end."""
    checks: Checks | None = None
    """What the finished text must meet beyond it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """``field`` of the request, the user's ``source`` in it, and the ``rules`` made of it."""

    field: str
    source: Any
    kind: Literal["json_schema", "regex", "lark", "gbnf", "several"]
    rules: Any
    checks: Checks | None = None
    """What of the source the rules do not hold."""
    is_users_own: bool = False

    def document(self) -> GrammarText:
        """Raises UnicodeEncodeError for half a character."""
        return GrammarText(self.field, self.build(), self.is_users_own, self.checks)

    def build(self) -> str:
        """llguidance's form of it. Raises UnicodeEncodeError for half a character."""
        from llguidance import LLMatcher

        match self.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(self.rules)
            case "regex":
                return LLMatcher.grammar_from_regex(self.rules)
            case "lark" | "gbnf":
                return LLMatcher.grammar_from_lark(self.rules)
            case "several":
                return json.dumps({"grammars": self.rules})


class CallsForm(ControlTokens, Protocol):
    """How the model writes calls, and which ``control_ids`` the dialect's marks have."""

    @property
    def dialect(self) -> Dialect: ...

    @property
    def control_ids(self) -> Mapping[str, int]: ...


def asked_for(request: GenerationRequest) -> tuple[str, Any] | None:
    """The field that asks for a grammar, and what it says; None if any text will do."""
    shape = None if request.forces_a_call else _asked_shape(request)
    if not request.forces_a_call and (shape is None or not request.may_call):
        return shape
    tools = [tool.model_dump(mode="json") for tool in _tools(request)]
    return ("tools", tools) if shape is None else (f"tools | {shape[0]}", [tools, shape[1]])


def grammar_of(request: GenerationRequest, form: CallsForm) -> Grammar | None:
    """The grammar of a request's text, or None if any text will do. Long ones take a while."""
    if request.forces_a_call:
        return _with_calls(request, form)
    shape = _shape(request, form)
    if shape is None or not request.may_call:
        return shape
    return _with_calls(request, form, otherwise=shape)


def _tools(request: GenerationRequest) -> Sequence[Tool]:
    """Those that may be called."""
    if not isinstance(request.tool_choice, NamedToolChoice):
        return request.tools
    name = request.tool_choice.function.name
    return [tool for tool in request.tools if tool.function.name == name]


def _asked_shape(request: GenerationRequest) -> tuple[str, Any] | None:
    if (wanted := request.response_format) is not None:
        if wanted.json_schema is not None:
            return "response_format.json_schema.schema", wanted.json_schema.schema_
        if wanted.type == "json_object":
            return "response_format", {"type": "object"}
    if (given := request.structured_outputs) is not None:
        kinds = {
            "json": given.json_,
            "regex": given.regex,
            "choice": given.choice,
            "grammar": given.grammar,
        }
        return next(
            (f"structured_outputs.{kind}", source)
            for kind, source in kinds.items()
            if source is not None
        )
    return None


def _shape(request: GenerationRequest, tokens: ControlTokens) -> Grammar | None:
    if (asked := _asked_shape(request)) is None:
        return None
    field, source = asked
    match field:
        case "structured_outputs.json":
            strict = request.structured_outputs is not None and request.structured_outputs.strict
            return _json_schema(field, source, strict=strict)
        case "structured_outputs.regex":
            return Grammar(field, source, "regex", source)
        case "structured_outputs.choice":
            texts = "start: " + " | ".join(map(json.dumps, source))
            return Grammar(field, source, "lark", texts)
        case "structured_outputs.grammar" if is_gbnf(source):
            lark = as_lark(field, source, tokens)
            return Grammar(field, source, "gbnf", lark, is_users_own=True)
        case "structured_outputs.grammar":
            return Grammar(field, source, "lark", source, is_users_own=True)
    return _json_schema(field, source)


def _json_schema(field: str, schema: dict[str, Any], *, strict: bool = False) -> Grammar:
    rules, unheld = _rules(field, schema)
    checks = _checks(field, schema, text=schema) if _is_checked(schema, unheld) else None
    if strict and unheld:
        words = ", ".join(unheld)
        raise refusal(field, f"must have no {words} with strict: no grammar holds them", schema)
    return Grammar(field, schema, "json_schema", rules, checks)


def _rules(
    field: str, schema: dict[str, Any], longest: float | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What of ``schema`` a grammar holds, and the keywords that it does not. ``longest``: as for
    :func:`relax`."""
    if (found := misspelt(schema)) is not None:
        word, keyword = found
        raise refusal(field, f"has no keyword {shown(word)}: is it {keyword}?", schema)
    relaxed = relax(schema, longest)
    options = _OPTIONS | ({"coerce_one_of": True} if "oneOf" in relaxed.keywords else {})
    return {"x-guidance": options, **relaxed.schema}, relaxed.keywords


def _is_checked(schema: dict[str, Any], unheld: Collection[str]) -> bool:
    """Whether the finished text is. Lengths alone are no reason to refuse what cannot be checked: a
    grammar takes schemas that are none to the letter, such as one with ``"title": null``."""
    if not unheld or not LENGTHS.issuperset(unheld):
        return bool(unheld)
    try:
        Checks(schema, {}).check_schemas()
    except ValueError:
        return False
    return True


def _checks(field: str, source: Any, **schemas: Any) -> Checks:
    checks = Checks(schemas.get("text"), schemas.get("arguments", {}))
    try:
        checks.check_schemas()
    except ValueError:
        raise refusal(
            field,
            "is no valid JSON Schema, or has a pattern or a $ref that cannot be checked here",
            source,
        ) from None
    return checks


def refusal(field: str, rule: str, source: Any) -> InvalidRequest:
    return InvalidRequest.from_fault(field, rule, describe(source))


def _with_calls(
    request: GenerationRequest, form: CallsForm, otherwise: Grammar | None = None
) -> Grammar:
    """Calls as the dialect writes them, or else what ``otherwise`` says."""
    dialect, control_ids = form.dialect, form.control_ids
    tools = _tools(request)

    def spelt(text: str) -> str:
        """``text`` in Lark, its control tokens by their ids."""
        terminal = _TERMINALS.get(otherwise.kind, ".+") if otherwise else ".+"
        parts = re.split(f"({any_of(control_ids)})", text) if control_ids else [text]
        return " ".join(
            f"<[{control_ids[part]}]>"
            if part in control_ids
            else " ".join(map(json.dumps, re.findall(terminal, part, re.DOTALL)))
            for part in parts
            if part
        )

    opening, between, closing = map(spelt, dialect.pieces())
    more = f"({between} call)*" if request.calls_in_parallel else ""
    lark = [
        "start: calls" + (" | @otherwise" if otherwise else ""),
        f"calls: {opening} call {more} {closing}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    longest = longest_held(map(_parameters, tools))
    parameters = [_rules("tools", _parameters(tool), longest) for tool in tools]
    # Each schema is a grammar of its own, so that "#" in it means that schema.
    schemas: list[dict[str, Any]] = []
    for index, (tool, (rules, _)) in enumerate(zip(tools, parameters, strict=True)):
        rule, written = f"arguments_{index}", dialect
        if dialect.keywords and is_plain(rules):
            for line, schema in keyword_rules(rule, rules):
                lark.append(line)
                schemas += [schema] if schema else []
        else:
            schemas.append({"name": rule, "json_schema": rules})
            rule = f"@{rule}"
            # The reader takes this form in every dialect.
            written = GENERIC if dialect.keywords else dialect
        head, tail = spelt(written.head % tool.function.name), spelt(written.tail)
        lark.append(f"call_{index}: {head} {rule} {tail}")
    grammars: list[dict[str, Any]] = [{"name": "calls", "lark_grammar": "\n".join(lark)}, *schemas]
    arguments = {
        tool.function.name: _parameters(tool)
        for tool, (_, unheld) in zip(tools, parameters, strict=True)
        if _is_checked(_parameters(tool), unheld)
    }
    text = otherwise.source if otherwise and otherwise.checks else None
    checks = None
    if arguments or text is not None:
        checks = _checks("tools", tools, text=text, arguments=arguments)
    asked = asked_for(request)
    assert asked is not None
    if otherwise is None:
        return Grammar(*asked, "several", grammars, checks)
    if otherwise.kind in ("lark", "gbnf"):
        grammars.append({"name": "otherwise", "lark_grammar": otherwise.rules})
    else:
        (whole,) = json.loads(otherwise.build())["grammars"]
        grammars.append({**whole, "name": "otherwise"})
    return Grammar(*asked, "several", grammars, checks, otherwise.is_users_own)


def _parameters(tool: Tool) -> dict[str, Any]:
    schema = tool.function.parameters
    if schema is None:
        # OpenAI: a function without parameters has an empty list of them.
        schema = {"additionalProperties": False}
    kinds = schema.get("type", ["object"])
    if isinstance(kinds, list) and "object" in kinds:
        # Also where null would do: arguments are an object.
        schema = {**schema, "type": "object"}
    return schema


def is_plain(parameters: Mapping[str, Any]) -> bool:
    """Whether keywords can say all that the schema asks for. What else it may allow, such as keys
    without a name in it, needs an object in JSON."""
    properties = parameters.get("properties")
    if properties is None:
        return parameters.get("additionalProperties") is False
    return (
        parameters.keys() <= _PLAIN
        and all(name.isidentifier() for name in properties)
        and properties.keys() >= set(parameters.get("required", ()))
        and all(map(_stands_alone, properties.values()))
        and all(
            reference.startswith(("#/$defs/", "#/definitions/"))
            for reference in _references(parameters)
        )
    )


def _stands_alone(schema: Any) -> bool:
    """Whether what is shared does not change its meaning. A schema may also be true or false."""
    return not isinstance(schema, dict) or schema.keys().isdisjoint(_SHARED)


def _references(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        match left.pop():
            case dict() as each:
                if isinstance(reference := each.get("$ref"), str):
                    yield reference
                left += each.values()
            case list() as each:
                left += each


def keyword_rules(
    rule: str, parameters: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Lines in Lark that define ``rule``, arguments as in Python: ``city="Bern", days=2``. Each
    comes with the schema that it calls ``@`` its own name."""
    properties = [
        (name, {} if schema is True else schema)
        for name, schema in parameters.get("properties", {}).items()
        if schema is not False
    ]
    required = set(parameters.get("required", ()))
    shared = {key: parameters[key] for key in _SHARED if key in parameters}
    # Two rules a keyword: for the first that is written, and for one behind others.
    for number, (name, schema) in enumerate(properties):
        optional = name not in required
        for begun, sign in ((f"{rule}_{number}", ""), (f"{rule}_{number}_more", ", ")):
            skipped = f" | {rule}_{number + 1}{'_more' if sign else ''}" if optional else ""
            value = f"{rule}_value_{number}"
            spelt = json.dumps(f"{sign}{name}=")
            line = f"{begun}: {spelt} @{value} {rule}_{number + 1}_more{skipped}"
            yield line, (None if sign else {"name": value, "json_schema": {**shared, **schema}})
    for end in (f"{rule}_{len(properties)}", f"{rule}_{len(properties)}_more"):
        yield f'{end}: ""', None
    yield f"{rule}: {rule}_0", None
