"""New tokens as an engine tells them, made of the events that readers get."""

from __future__ import annotations

from collections.abc import Iterable

from llorch_worker.contract import Event, Tokens
from llorch_worker.engine.told import CallTold, TokenScore, TokensTold
from llorch_worker.worker.publisher import as_events, merge_tokens


def told_of(event: Tokens) -> TokensTold:
    return TokensTold(
        handle=0,
        choice=event.choice,
        index=event.index,
        ids=[*event.ids],
        text=event.text,
        thought=event.reasoning_content,
        scores=None if event.logprobs is None else [*map(TokenScore.of, event.logprobs)],
        calls=None if event.tool_calls is None else [*map(CallTold.of, event.tool_calls)],
    )


def merged(events: Iterable[Event]) -> list[Event]:
    """The events as a publisher merges them."""
    told = (told_of(event) if isinstance(event, Tokens) else event for event in events)
    return as_events(merge_tokens(told))
