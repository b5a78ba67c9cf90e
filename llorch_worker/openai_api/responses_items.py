"""The items of ``/v1/responses``: what goes in, what comes out, and the conversation of both."""

from __future__ import annotations

import binascii
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SkipValidation,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError

from llorch_worker.openai_api.logprobs import ChatToken
from llorch_worker.openai_api.shape import ONLY_TEXT, Label, Shape

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_SEAL = "llorch."
SUMMARY = "Summary of the conversation so far:\n"
"""Before the text of a compaction, for the model."""


def sealed(text: str) -> str:
    """``text`` as an ``encrypted_content``: encoded, for clients that send back nothing else of
    it. It is no secret from those who got it."""
    return _SEAL + urlsafe_b64encode(text.encode()).decode()


def unsealed(content: str | None) -> str | None:
    """The text that was sealed; None if another service encrypted it."""
    if content is None or not content.startswith(_SEAL):
        return None
    try:
        return urlsafe_b64decode(content.removeprefix(_SEAL)).decode()
    except (binascii.Error, ValueError):
        return None


class _Read(Shape):
    """A part of a history, which another service may have written. What is not declared says
    nothing to the model."""

    model_config = ConfigDict(extra="ignore")


class InputText(_Read):
    type: Literal["input_text"] = "input_text"
    text: str


class Refusal(_Read):
    """What was said in place of a text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class OutputText(_Read):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Annotated[list[Any], AfterValidator(lambda _: [])] = Field(default_factory=list)
    """Always empty; those of other services are dropped."""
    logprobs: Annotated[
        list[ChatToken], BeforeValidator(lambda value: [] if value is None else value)
    ] = Field(default_factory=list)


def _as_parts(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        kind = "output_text" if value.get("role") == "assistant" else "input_text"
        return {**value, "content": [{"type": kind, "text": value["content"]}]}
    return value


def type_of(value: Any) -> Any:
    """The ``type`` of a document, or of what was read from one."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


Part = Annotated[
    Annotated[InputText, Tag("input_text")]
    | Annotated[OutputText, Tag("output_text")]
    | Annotated[Refusal, Tag("refusal")],
    Discriminator(
        type_of,
        custom_error_type="part",
        custom_error_message="must be input_text, output_text or refusal",
    ),
    ONLY_TEXT,
]


class MessageItem(_Read):
    """A turn of the conversation."""

    id: Label | None = None
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    """A developer's turn is a system's."""
    status: ItemStatus | None = "completed"
    content: list[Part]
    """Texts in parts are joined by newlines. A string is one part."""
    phase: Literal["commentary", "final_answer"] | None = Field(
        None, exclude_if=lambda phase: phase is None
    )
    """Which of an assistant's messages it is; sent back, and without effect."""


class ReasoningText(_Read):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: Label


class SummaryText(_Read):
    type: Literal["summary_text"] = "summary_text"
    text: Label


def _or_none(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


class ReasoningItem(_Read):
    """What the model thought before the turn that follows."""

    id: Label | None = None
    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list)
    """Empty in answers, which have the whole thought. Read where nothing else can be."""
    content: list[ReasoningText] | None = None
    encrypted_content: Annotated[Label | None, WrapValidator(_or_none)] = None
    """The thought again, for clients that do not send ``content`` back, if include asks for it.
    Those of other services say nothing here."""
    status: ItemStatus | None = "completed"

    @property
    def thought(self) -> str:
        sent_back = unsealed(self.encrypted_content)
        if not self.content and sent_back is not None:
            return sent_back
        return "\n".join(part.text for part in self.content or self.summary)


class FunctionCallItem(_Read):
    """A call that the model made."""

    id: Label | None = None
    type: Literal["function_call"]
    call_id: SkipValidation[str]
    name: SkipValidation[str]
    arguments: SkipValidation[str]
    """JSON, as the model wrote it."""
    status: ItemStatus | None = "completed"


class FunctionCallOutputItem(_Read):
    """What the call gave."""

    id: Label | None = None
    type: Literal["function_call_output"]
    call_id: SkipValidation[str]
    output: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[Annotated[InputText, ONLY_TEXT]], Tag("parts")],
        Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
    ]
    status: ItemStatus | None = "completed"


class CompactionItem(_Read):
    """What is left of the turns before it: an answer of ``/v1/responses/compact``."""

    id: Label | None = None
    type: Literal["compaction"]
    encrypted_content: str

    @field_validator("encrypted_content")
    @classmethod
    def _ours(cls, content: str) -> str:
        if unsealed(content) is None:
            raise PydanticCustomError("compaction", "must be of a compaction made here")
        return content


class ItemReference(_Read):
    """An item of a response that is kept, or of the conversation that goes on."""

    type: Literal["item_reference"] = "item_reference"
    id: Label


class ElsewhereItem(_Read):
    """What only another service could read or has run: nothing of it reaches the model."""

    type: Label


def _kind(value: Any) -> str | None:
    """The tag of an item. An id alone is a reference."""
    kind = type_of(value)
    if kind is None:
        bare = isinstance(value, dict) and "id" in value and "role" not in value
        return "item_reference" if bare else "message"
    if not isinstance(kind, str):
        return None
    kind = kind.replace("custom_tool_call", "function_call")
    return kind if kind in _PREFIXES or kind == "item_reference" else "elsewhere"


def _as_call(value: Any) -> Any:
    """The call of a tool whose input is a text, as that of a function with this text."""
    if isinstance(value, dict) and str(value["type"]).startswith("custom"):
        arguments = json.dumps({"input": value.get("input", "")}, ensure_ascii=False)
        return {"arguments": arguments, **value, "type": _kind(value)}
    return value


_Item = (
    Annotated[MessageItem, BeforeValidator(_as_parts), Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, BeforeValidator(_as_call), Tag("function_call")]
    | Annotated[FunctionCallOutputItem, BeforeValidator(_as_call), Tag("function_call_output")]
    | Annotated[CompactionItem, Tag("compaction")]
)
_BY_KIND = Discriminator(
    _kind, custom_error_type="item", custom_error_message="must have a type that is a text"
)
Item = Annotated[_Item, _BY_KIND]
"""What a conversation is made of."""
InputItem = Annotated[
    _Item
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ElsewhereItem, Tag("elsewhere")],
    _BY_KIND,
]
Read = Item | ElsewhereItem
"""The items of a request once its references are found."""
OutputItem = ReasoningItem | MessageItem | FunctionCallItem

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "compaction": "cmp",
}


def item_id(kind: str, job_id: str, number: int) -> str:
    """The id of the item of a response that has this ``number`` among its inputs and outputs."""
    return f"{_PREFIXES[kind]}_{job_id}_{number}"


def job_of(id_: str) -> str:
    """The job whose response gave an item this id; some text if none did."""
    return id_.partition("_")[2].rpartition("_")[0]


def with_ids(items: Iterable[Read], job_id: str) -> list[Item]:
    """What was read of ``items``, as answers have them: with ids and states. Those from a client
    keep theirs."""
    return [
        item.model_copy(
            update={"id": item.id or item_id(item.type, job_id, number)}
            | ({} if isinstance(item, CompactionItem) else {"status": item.status or "completed"})
        )
        for number, item in enumerate(i for i in items if not isinstance(i, ElsewhereItem))
    ]


def turns_of(items: Sequence[Read]) -> tuple[list[dict[str, Any]], list[int]]:
    """The fields of the contract's messages, and for each the index of its first item.

    A function call belongs to the assistant's turn before it, a thought to the one behind it.
    """
    turns: list[dict[str, Any]] = []
    firsts: list[int] = []
    thought = ""
    for index, item in enumerate(items):
        if isinstance(item, ElsewhereItem):
            continue
        if isinstance(item, ReasoningItem):
            thought = item.thought
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


def _turn(item: MessageItem | FunctionCallOutputItem | CompactionItem) -> dict[str, Any]:
    if isinstance(item, CompactionItem):
        return {"role": "assistant", "content": f"{SUMMARY}{unsealed(item.encrypted_content)}"}
    if isinstance(item, FunctionCallOutputItem):
        parts = item.output
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": "\n".join(part.text for part in item.content)}
