"""One turn of a chat, as clients of any service send it back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, SkipValidation, model_validator
from pydantic_core import PydanticCustomError

from llorch_worker.contract.tools import MAX_TOOLS
from llorch_worker.openai_api.shape import ONLY_TEXT, Shape


class Loose(Shape):
    """A part of a history, which another service may have written. What is not declared says
    nothing to the model: ``annotations``, ``cache_control``, ``provider_specific_fields``, ..."""

    model_config = ConfigDict(extra="allow")


class Part(Loose):
    """A text, a refusal in place of one, or the thought before it."""

    type: Literal["text", "refusal", "thinking"]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> Part:
        if getattr(self, self.type) is None:
            raise PydanticCustomError("part", "must have a field {name}", {"name": self.type})
        return self

    @property
    def said(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class CalledFunction(Loose):
    name: SkipValidation[str]
    arguments: SkipValidation[Any] = ""
    """As the model wrote it: also empty, or no JSON. An object is read too."""


class AssistantCall(Loose):
    """A call of an earlier turn, as an answer had it."""

    id: SkipValidation[str | None] = None
    """Not every service gives one: see :func:`with_call_ids`."""
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_contract(self) -> dict[str, Any]:
        given = self.function.arguments
        arguments = json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else given
        function = {"name": self.function.name, "arguments": "" if given is None else arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(Loose):
    """One turn of a chat. Which fields belong to which role, the contract checks."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """A developer's turn is a system's."""
    content: Annotated[
        list[Annotated[Part, ONLY_TEXT]] | None,
        BeforeValidator(_as_parts, json_schema_input_type=str | list[Part] | None),
    ] = None
    """Texts in parts are joined by newlines."""
    name: SkipValidation[str | None] = None
    """Who speaks, for templates that show it."""
    refusal: str | None = None
    """What an assistant said in place of a content."""
    reasoning_content: SkipValidation[str | None] = None
    """An assistant's thought, as answers have it."""
    reasoning: Any = None
    """Other services' name of it; what is no text says nothing."""
    tool_calls: list[AssistantCall] | None = None
    tool_call_id: SkipValidation[str | None] = None

    audio: None = None
    """Null in answers to texts, like the field below."""
    function_call: None = None

    def to_contract(self) -> dict[str, Any]:
        """The fields of the contract's ``Message``."""
        calls = [call.to_contract() for call in self.tool_calls or ()] or None
        turn = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._content(),
            "name": self.name or None,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id if self.role == "tool" else None,
        }
        if self.role in ("assistant", "tool") and calls is None:
            # An answer that is only a thought, or a tool that gave nothing.
            turn["content"] = turn["content"] or ""
        if self.role == "assistant":
            turn["reasoning_content"] = self._thought()
        return turn

    def _content(self) -> str | None:
        if self.content is None:
            return self.refusal
        return "\n".join(part.said for part in self.content if part.said is not None)

    def _thought(self) -> Any:
        if self.reasoning_content is not None:
            return self.reasoning_content
        if isinstance(self.reasoning, str):
            return self.reasoning
        thoughts = [part.thinking for part in self.content or () if part.thinking is not None]
        return "\n".join(thoughts) if thoughts else None


def turns_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The fields of the contract's messages."""
    return with_call_ids([message.to_contract() for message in messages])


def with_call_ids(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``turns`` of the contract, with ids for calls that have none. The results without an id
    answer these, of the turn before them, by name or else in order."""
    given = [call["id"] for turn in turns for call in turn.get("tool_calls") or ()]
    given += [turn.get("tool_call_id") for turn in turns]
    taken = {each for each in given if isinstance(each, str)}
    unused = (each for n in count() if (each := f"call_{n}") not in taken)
    unanswered: list[dict[str, Any]] = []
    for turn in turns:
        calls = turn.get("tool_calls") or ()
        if calls or turn["role"] == "user":
            unanswered = []
        for call in calls:
            if not call["id"]:
                call["id"] = next(unused)
                unanswered.append(call)
        # The contract refuses more: do not search them for each result.
        del unanswered[MAX_TOOLS:]
        if turn["role"] == "tool" and not turn["tool_call_id"] and unanswered:
            name = turn.get("name")
            named = (n for n, call in enumerate(unanswered) if call["function"]["name"] == name)
            turn["tool_call_id"] = unanswered.pop(next(named, 0))["id"]
    return turns
