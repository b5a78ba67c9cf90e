"""Functions that the model may call, in OpenAI's shapes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from llorch_worker.contract.output_format import JsonSchema, Name

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 16_384
MAX_ARGUMENTS_CHARS = 1_000_000
MAX_ARGUMENTS_DEPTH = 64


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Function(_Part):
    """A function as the model sees it; ``parameters`` is a JSON Schema."""

    name: Name
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    parameters: JsonSchema | None = None
    strict: bool | None = None
    """Accepted and without effect: a forced call always fits its schema."""


class Tool(_Part):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(_Part):
    name: Name


class NamedToolChoice(_Part):
    """The one function that the model must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionCall(_Part):
    name: Name
    arguments: str = Field(max_length=MAX_ARGUMENTS_CHARS)
    """JSON, as the model wrote it."""


class ToolCall(_Part):
    """A call that the model made."""

    id: str = Field(min_length=1, max_length=100)
    type: Literal["function"] = "function"
    function: FunctionCall
