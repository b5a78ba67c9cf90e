"""The blocks of a conversation in Anthropic's shape, and the turns of a chat that they mean."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Tag

from llorch_worker.openai_api.shape import ONLY_TEXT


class Loose(BaseModel):
    """A part of a document. Fields that are not declared, such as ``cache_control``, change nothing
    here."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class TextBlock(Loose):
    type: Literal["text"]
    text: str


class ThinkingBlock(Loose):
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Loose):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ElsewhereBlock(Loose):
    """What only another service could read or has run: nothing of it reaches the model."""

    type: str


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[
    list[Annotated[TextBlock, ONLY_TEXT]],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(Loose):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    """A failure; its text begins with "Error: " then."""

    @property
    def text(self) -> str:
        text = _joined(self.content or ())
        return f"Error: {text}" if self.is_error else text


_NOT_READ = frozenset(("image", "document", "search_result", "container_upload"))


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str) or kind in _NOT_READ:
        return None
    return kind if kind in ("text", "thinking", "tool_use", "tool_result") else "elsewhere"


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ElsewhereBlock, Tag("elsewhere")],
    Discriminator(
        _kind,
        custom_error_type="block",
        custom_error_message="must be text, thinking, tool_use or tool_result",
    ),
    ONLY_TEXT,
]


class Turn(Loose):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
    ]


def turns_of(system: Sequence[TextBlock], turns: Sequence[Turn]) -> Iterator[tuple[str, Any]]:
    """The fields of the contract's messages, each with its place in the client's document.

    As in Anthropic's API, neighbours of one role are one turn. Results of calls go before the text
    beside them.
    """
    if system:
        yield "system", {"role": "system", "content": _joined(system)}
    place = ""
    open_turn: _OpenTurn | None = None
    for index, turn in enumerate(turns):
        blocks = sorted(turn.content, key=lambda block: not isinstance(block, ToolResultBlock))
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        if open_turn is not None and (results or open_turn.role != turn.role):
            yield place, open_turn.fields()
            open_turn = None
        for block in results:
            yield (
                f"messages.{index}",
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text},
            )
        if len(results) == len(blocks) and results:
            continue
        if open_turn is None:
            place, open_turn = f"messages.{index}", _OpenTurn(turn.role)
        open_turn.add(blocks)
    if open_turn is not None:
        yield place, open_turn.fields()


def elsewhere(turns: Sequence[Turn]) -> Iterator[str]:
    """The types of blocks of which nothing reaches the model."""
    for turn in turns:
        for block in turn.content:
            if isinstance(block, ElsewhereBlock):
                yield block.type


class _OpenTurn:
    """A turn to which the next one of its role is added. Texts are joined once, at the end."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            match block:
                case TextBlock(text=text):
                    self._texts.append(text)
                case ThinkingBlock(thinking=thought):
                    self._thoughts.append(thought)
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": json.dumps(block.input)}
                    call = {"id": block.id, "type": "function", "function": function}
                    self._calls.append(call)
        if not self._texts and not self._calls:
            self._texts.append("")

    def fields(self) -> dict[str, Any]:
        """Those of the contract's message."""
        content = "\n".join(self._texts) if self._texts else None
        turn: dict[str, Any] = {"role": self.role, "content": content}
        if self._thoughts:
            turn["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            turn["tool_calls"] = self._calls
        return turn


def _joined(texts: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in texts)
