"""Several token events of one choice as one: fewer entries in the stream, same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llorch_worker.contract import Event, Tokens


@dataclass
class _Run:
    parts: list[Tokens]

    def continued_by(self, event: Tokens) -> bool:
        last = self.parts[-1]
        return event.index == last.index + len(last.ids) and (event.logprobs is None) == (
            last.logprobs is None
        )

    def joined(self) -> Tokens:
        first = self.parts[0]
        if len(self.parts) == 1:
            return first
        return Tokens(
            choice=first.choice,
            index=first.index,
            ids=tuple(token for part in self.parts for token in part.ids),
            text="".join(part.text for part in self.parts),
            logprobs=None
            if first.logprobs is None
            else tuple(entry for part in self.parts for entry in part.logprobs or ()),
        )


def merge_tokens(events: Iterable[Event]) -> list[Event]:
    """``events`` with each choice's adjoining tokens joined.

    The order within a choice, and of tokens against all other events, stays; tokens of different
    choices may move past each other, which no reader can tell.
    """
    joined: list[_Run | Event] = []
    open_runs: dict[int, _Run] = {}
    for event in events:
        if not isinstance(event, Tokens):
            open_runs.clear()
            joined.append(event)
            continue
        run = open_runs.get(event.choice)
        if run is not None and run.continued_by(event):
            run.parts.append(event)
        else:
            open_runs[event.choice] = run = _Run([event])
            joined.append(run)
    return [item.joined() if isinstance(item, _Run) else item for item in joined]
