"""The grammar that a request's text must fit, in llguidance's form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from llorch_worker.contract import GenerationRequest, NamedToolChoice, Tool

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as ``json.dumps`` and chat templates write it. So all but the values is forced
and needs no steps, and no weak model writes white space for ever. A schema's own ``x-guidance``
replaces it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """``text`` in llguidance's form; ``field`` of the request and the user's ``source`` in it."""

    field: str
    source: Any
    text: str


def grammar_of(request: GenerationRequest) -> Grammar | None:
    """The grammar of a request's text, or None if any text will do."""
    if (wanted := request.response_format) is not None:
        if wanted.json_schema is not None:
            schema = wanted.json_schema.schema_
            return _json_schema("response_format.json_schema.schema", schema)
        if wanted.type == "json_object":
            return _json_schema("response_format", {"type": "object"})
    if (given := request.structured_outputs) is not None:
        if given.json_ is not None:
            return _json_schema("structured_outputs.json", given.json_)
        if given.regex is not None:
            text = LLMatcher.grammar_from_regex(given.regex)
            return Grammar("structured_outputs.regex", given.regex, text)
        if given.choice is not None:
            texts = "start: " + " | ".join(map(json.dumps, given.choice))
            lark = LLMatcher.grammar_from_lark(texts)
            return Grammar("structured_outputs.choice", given.choice, lark)
        assert given.grammar is not None
        lark = LLMatcher.grammar_from_lark(given.grammar)
        return Grammar("structured_outputs.grammar", given.grammar, lark)
    return _forced_calls(request) if request.forces_a_call else None


def _json_schema(field: str, schema: dict[str, Any]) -> Grammar:
    text = LLMatcher.grammar_from_json_schema({"x-guidance": _OPTIONS, **schema})
    return Grammar(field, schema, text)


def _forced_calls(request: GenerationRequest) -> Grammar:
    """Calls as Llama 3.x writes them, in the spelling of its own template.

    Several calls are separated by "; ", as Llama 3.x writes them.
    """
    tools = request.tools
    if isinstance(request.tool_choice, NamedToolChoice):
        name = request.tool_choice.function.name
        tools = tuple(tool for tool in tools if tool.function.name == name)
    more = ' ("; " call)*' if request.parallel_tool_calls else ""
    rules = [f"start: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.function.name}", "parameters": ')
        rules.append(f'call_{index}: {head} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(_parameters(tool))}")
    source = [tool.model_dump(mode="json") for tool in tools]
    return Grammar("tools", source, LLMatcher.grammar_from_lark("\n".join(rules)))


def _parameters(tool: Tool) -> dict[str, Any]:
    schema = tool.function.parameters
    if schema is None:
        # OpenAI: a function without parameters has an empty list of them.
        return {"type": "object", "additionalProperties": False}
    return {"type": "object", "x-guidance": _OPTIONS, **schema}
