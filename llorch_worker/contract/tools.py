"""Functions that the model may call, in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from llorch_worker.contract.output_format import JsonSchema, Name, Part, as_tuple

MAX_TOOLS = 1_000
"""Agents offer the tools of all their servers. MAX_TOOLS_BYTES also holds."""
MAX_DESCRIPTION_CHARS = 65_536
MAX_CALLED_NAME_CHARS = 256
MAX_TOOLS_BYTES = 1_048_576
"""Of all tools as JSON: some 250,000 tokens of a prompt."""
MAX_CALL_ID_CHARS = 16_384
"""Some services sign the thought before a call in its id."""
MAX_ARGUMENTS_CHARS = 1_000_000
MAX_ARGUMENTS_DEPTH = 64
_OTHER_TYPES = ("null", "boolean", "integer", "number", "string", "array")


def _takes_an_object(parameters: dict[str, Any]) -> dict[str, Any]:
    kinds = parameters.get("type", "object")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    # What is no type at all is an error in the schema, which the grammar's compiler reports.
    if kinds and all(kind in _OTHER_TYPES for kind in kinds):
        raise PydanticCustomError("parameters", "must describe an object: type must be object")
    return parameters


class Function(Part):
    """A function as the model sees it; ``parameters`` is a JSON Schema."""

    name: Name
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    parameters: Annotated[JsonSchema, AfterValidator(_takes_an_object)] | None = None
    strict: bool | None = None
    """Accepted and without effect: a forced call always fits its schema."""


class Tool(Part):
    type: Literal["function"] = "function"
    function: Function


def _agreeing(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    if len({tool.function.name for tool in tools}) < len(tools):
        raise PydanticCustomError("tools", "two functions have the same name")
    if sum(len(tool.model_dump_json(exclude_none=True)) for tool in tools) > MAX_TOOLS_BYTES:
        rule = "must be at most {limit} bytes as JSON together"
        raise PydanticCustomError("tools", rule, {"limit": MAX_TOOLS_BYTES})
    return tools


Tools = Annotated[
    tuple[Tool, ...],
    Field(max_length=MAX_TOOLS),
    BeforeValidator(as_tuple),
    AfterValidator(_agreeing),
]


class NamedFunction(Part):
    name: Name


class NamedToolChoice(Part):
    """The one function that the model must call."""

    type: Literal["function"] = "function"
    function: NamedFunction

    @model_validator(mode="before")
    @classmethod
    def _name_of_a_function(cls, value: object) -> object:
        # As in Responses.
        match value:
            case {"type": "function", "name": name, **rest} if not rest:
                return {"function": {"name": name}}
        return value


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionCall(Part):
    name: str = Field(min_length=1, max_length=MAX_CALLED_NAME_CHARS)
    """In a history, also of a function that no tool here could have."""
    arguments: str = Field(max_length=MAX_ARGUMENTS_CHARS)
    """JSON, as the model wrote it."""


class CallPart(Part):
    """What is new of an answer's call. The first part has ``id`` and ``name``."""

    index: int
    """Of the call within its answer."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolCall(Part):
    """A call that the model made."""

    id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    type: Literal["function"] = "function"
    function: FunctionCall
