"""The items of ``/v1/responses``: what goes in, what comes out, and the conversation of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, SkipValidation, Tag

from llorch_worker.openai_api.logprobs import ChatToken
from llorch_worker.openai_api.shape import Label, Shape

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Shape):
    type: Literal["input_text"] = "input_text"
    text: str


class OutputText(Shape):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Annotated[list[Any], AfterValidator(lambda _: [])] = Field(default_factory=list)
    """Always empty; those of other services are dropped."""
    logprobs: list[ChatToken] = Field(default_factory=list)


def _as_parts(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        kind = "output_text" if value.get("role") == "assistant" else "input_text"
        return {**value, "content": [{"type": kind, "text": value["content"]}]}
    return value


def _type(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


Part = Annotated[
    Annotated[InputText, Tag("input_text")] | Annotated[OutputText, Tag("output_text")],
    Discriminator(
        _type, custom_error_type="part", custom_error_message="must be input_text or output_text"
    ),
]


class MessageItem(Shape):
    """A turn of the conversation."""

    id: Label | None = None
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    """A developer's turn is a system's."""
    status: ItemStatus | None = "completed"
    content: list[Part]
    """Texts in parts are joined by newlines. A string is one part."""


class ReasoningText(Shape):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(Shape):
    """What the model thought before the turn that follows."""

    id: Label | None = None
    type: Literal["reasoning"]
    summary: list[Any] = Field(default_factory=list)
    """Empty in answers; dropped."""
    content: list[ReasoningText] | None = None
    encrypted_content: SkipValidation[Any] = None
    """Of other services; dropped."""
    status: ItemStatus | None = "completed"


class FunctionCallItem(Shape):
    """A call that the model made."""

    id: Label | None = None
    type: Literal["function_call"]
    call_id: SkipValidation[str]
    name: SkipValidation[str]
    arguments: SkipValidation[str]
    """JSON, as the model wrote it."""
    status: ItemStatus | None = "completed"


class FunctionCallOutputItem(Shape):
    """What the call gave."""

    id: Label | None = None
    type: Literal["function_call_output"]
    call_id: SkipValidation[str]
    output: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[InputText], Tag("parts")],
        Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
    ]
    status: ItemStatus | None = "completed"


Item = Annotated[
    Annotated[MessageItem, BeforeValidator(_as_parts), Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")],
    Discriminator(
        lambda value: _type(value) or "message",
        custom_error_type="item",
        custom_error_message="must be a message, reasoning, a function_call or its output",
    ),
]
OutputItem = ReasoningItem | MessageItem | FunctionCallItem

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def item_id(kind: str, job_id: str, number: int) -> str:
    """The id of the item of a response that has this ``number`` among its inputs and outputs."""
    return f"{_PREFIXES[kind]}_{job_id}_{number}"


def with_ids(items: Iterable[Item], job_id: str) -> list[Item]:
    """``items`` as answers have them: with ids and states. Those from a client keep theirs."""
    return [
        item.model_copy(
            update={
                "id": item.id or item_id(item.type, job_id, number),
                "status": item.status or "completed",
            }
        )
        for number, item in enumerate(items)
    ]


def turns_of(items: Sequence[Item]) -> tuple[list[dict[str, Any]], list[int]]:
    """The fields of the contract's messages, and for each the index of its first item.

    A function call belongs to the assistant's turn before it, a thought to the one behind it.
    """
    turns: list[dict[str, Any]] = []
    firsts: list[int] = []
    thought = ""
    for index, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            thought = "\n".join(part.text for part in item.content or ())
            continue
        if isinstance(item, FunctionCallItem):
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant"} | _with_thought(thought))
                thought = ""
                firsts.append(index)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "function": function}
            turns[-1].setdefault("tool_calls", []).append(call)
            continue
        turn = _turn(item)
        turns.append(turn | _with_thought(thought if turn["role"] == "assistant" else ""))
        firsts.append(index)
        thought = ""
    return turns, firsts


def _with_thought(thought: str) -> dict[str, Any]:
    return {"reasoning_content": thought} if thought else {}


def _turn(item: MessageItem | FunctionCallOutputItem) -> dict[str, Any]:
    if isinstance(item, FunctionCallOutputItem):
        parts = item.output
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": "\n".join(part.text for part in item.content)}
