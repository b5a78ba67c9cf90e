"""Merges token events: fewer entries in the stream, the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llorch_worker.contract import CallPart, Event, Tokens


def merge_tokens(events: Iterable[Event]) -> list[Event]:
    """``events`` with each choice's consecutive tokens merged into one event.

    The order within a choice is kept, and so is the order of tokens and other events. Tokens of
    different choices may change places, which makes no difference to a reader.
    """
    merged: list[Event | list[Tokens]] = []
    runs: dict[int, list[Tokens]] = {}
    for event in events:
        if not isinstance(event, Tokens):
            runs.clear()
            merged.append(event)
        elif event.choice in runs and _continues(runs[event.choice][-1], event):
            runs[event.choice].append(event)
        else:
            runs[event.choice] = [event]
            merged.append(runs[event.choice])
    return [_join(item) if isinstance(item, list) else item for item in merged]


def _continues(last: Tokens, event: Tokens) -> bool:
    same_kind = (event.logprobs is None) == (last.logprobs is None)
    return same_kind and event.index == last.index + len(last.ids)


def _join(run: Sequence[Tokens]) -> Tokens:
    first = run[0]
    if len(run) == 1:
        return first
    return Tokens(
        choice=first.choice,
        index=first.index,
        ids=tuple(token for part in run for token in part.ids),
        text="".join(part.text for part in run),
        reasoning_content="".join(part.reasoning_content or "" for part in run) or None,
        tool_calls=_join_calls(part for event in run for part in event.tool_calls or ()),
        logprobs=None
        if first.logprobs is None
        else tuple(entry for part in run for entry in part.logprobs or ()),
    )


def _join_calls(parts: Iterable[CallPart]) -> tuple[CallPart, ...] | None:
    joined: list[CallPart] = []
    for part in parts:
        if joined and joined[-1].index == part.index:
            arguments = joined[-1].arguments + part.arguments
            joined[-1] = joined[-1].model_copy(update={"arguments": arguments})
        else:
            joined.append(part)
    return tuple(joined) or None
