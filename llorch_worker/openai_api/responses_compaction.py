"""A conversation that is compacted: its user's messages stay, a summary replaces the rest."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from llorch_worker.openai_api.responses import Response, ResponseRecord, ResponseUsage
from llorch_worker.openai_api.responses_items import (
    CompactionItem,
    InputText,
    Item,
    MessageItem,
    sealed,
    with_ids,
)
from llorch_worker.openai_api.responses_request import ResponseRequest

SUMMARISE = (
    "Summarise our conversation so far for someone who goes on with it and has not read it: what "
    "was asked, what was found and done, what is left to do. Answer with the summary alone."
)

_NOT_OF_A_SUMMARY = (
    *("tools", "tool_choice", "text", "include"),
    *("idempotency_key", "callback_url", "background", "stream"),
)
"""Fields that would make the answer another than the summary, or come back for it."""


class Compacted(BaseModel):
    """What takes the place of a conversation: its user's messages, and a summary of all of it."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[Item]
    usage: ResponseUsage


def summarising(request: ResponseRequest) -> ResponseRequest:
    """The request for the summary of a conversation that ends with the input of ``request``."""
    ask = MessageItem(role="user", content=[InputText(text=SUMMARISE)])
    reset = dict.fromkeys(_NOT_OF_A_SUMMARY)
    return request.model_copy(update=reset | {"input": [*request.input, ask], "store": False})


def compacted(record: ResponseRecord, response: Response) -> Compacted:
    """``record`` and ``response``: of a :func:`summarising` request, and its completed end."""
    *turns, _ = record.conversation
    spoken = [turn for turn in turns if isinstance(turn, MessageItem) and turn.role == "user"]
    summary = "".join(
        part.text
        for item in response.output
        if isinstance(item, MessageItem)
        for part in item.content
    )
    rest = CompactionItem(type="compaction", encrypted_content=sealed(summary))
    assert response.usage is not None
    return Compacted(
        id=response.id,
        created_at=response.created_at,
        output=with_ids([*spoken, rest], record.job_id),
        usage=response.usage,
    )
