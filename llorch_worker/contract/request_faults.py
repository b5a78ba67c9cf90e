"""What pydantic finds in a request, as faults that quote no text of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic_core import ErrorDetails

from llorch_worker.contract.errors import Fault
from llorch_worker.contract.message import Message
from llorch_worker.contract.output_format import (
    NamedSchema,
    Part,
    ResponseFormat,
    StructuredOutputs,
)
from llorch_worker.contract.rules import rule_of
from llorch_worker.contract.shown import describe, shown
from llorch_worker.contract.token_ids import TOKEN_ID
from llorch_worker.contract.tools import (
    Function,
    FunctionCall,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolCall,
)
from llorch_worker.misspelt import did_you_mean, meant

_PARTS_FIELDS = {
    field.alias or name
    for part in (
        *(Message, ToolCall, FunctionCall, Tool, Function, NamedToolChoice, NamedFunction),
        *(ResponseFormat, NamedSchema, StructuredOutputs),
    )
    for name, field in part.model_fields.items()
}
_INNER: dict[str, tuple[str, type[Part]]] = {
    "response_format": ("json_schema", NamedSchema),
    "tools": ("function", Function),
    "tool_choice": ("function", NamedFunction),
    "tool_calls": ("function", FunctionCall),
}
"""The part within a part in which other services' fields stand one level higher."""


def fault_of(error: ErrorDetails, fields: Iterable[str]) -> Fault:
    """The fault that pydantic found in a request with these ``fields``."""
    unknown = error["type"] == "extra_forbidden"
    *path, last = [part for part in error["loc"] if part != "[key]"] or ["request"]
    parts = [str(part) for index, part in enumerate(path) if index == 0 or _is_ours(part)]
    if unknown:
        parts.append(shown(str(last)))
    elif not path or _is_ours(last):
        parts.append(str(last))
    rule = rule_of(error)
    if unknown:
        rule = _unknown(path, str(last), fields)
    return Fault(field=".".join(parts), rule=rule, got=describe(error["input"]))


def _unknown(path: Sequence[int | str], name: str, fields: Iterable[str]) -> str:
    right = meant(name, _PARTS_FIELDS if path else fields)
    if right != name:
        return did_you_mean(right)
    outer = next((part for part in reversed(path) if isinstance(part, str)), "")
    inner, part = _INNER.get(outer, ("", Part))
    held = {field.alias or each for each, field in part.model_fields.items()}
    return f"unknown field; it belongs in {inner}" if name in held else "unknown field"


def _is_ours(part: int | str) -> bool:
    """Whether a part of a path is an index, a token id or a field, and not a key of the user's."""
    if isinstance(part, int):
        return part.bit_length() <= 64
    return part in _PARTS_FIELDS or TOKEN_ID.fullmatch(part) is not None
