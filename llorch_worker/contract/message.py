"""One turn of a chat."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from llorch_worker.contract.output_format import NOT_EMPTY, Part, as_tuple
from llorch_worker.contract.tools import MAX_CALL_ID_CHARS, MAX_TOOLS, ToolCall

MAX_PROMPT_CHARS = 1_000_000
"""Of a prompt, and of the text of one turn."""
MAX_SPEAKER_CHARS = 256


class Message(Part):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = Field(None, max_length=MAX_PROMPT_CHARS)
    name: str | None = Field(None, min_length=1, max_length=MAX_SPEAKER_CHARS)
    """Who speaks, or which tool: for templates that show it."""
    reasoning_content: str | None = Field(None, max_length=MAX_PROMPT_CHARS)
    """The thought of an assistant's turn, which templates may show."""
    tool_calls: Annotated[
        Annotated[tuple[ToolCall, ...], Field(max_length=MAX_TOOLS), NOT_EMPTY] | None,
        BeforeValidator(as_tuple),
    ] = None
    """What an assistant's turn called."""
    tool_call_id: str | None = Field(None, min_length=1, max_length=MAX_CALL_ID_CHARS)
    """The call that a tool's turn answers."""

    @model_validator(mode="after")
    def _fields_of_the_role(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "tool_calls belong to an assistant's turn")
        if self.reasoning_content is not None and self.role != "assistant":
            raise PydanticCustomError(
                "reasoning_content", "reasoning_content belongs to an assistant's turn"
            )
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError(
                "tool_call_id", "tool_call_id belongs to a tool's turn, which must have one"
            )
        if self.content is None and self.tool_calls is None:
            raise PydanticCustomError("content", "content must be given")
        return self
