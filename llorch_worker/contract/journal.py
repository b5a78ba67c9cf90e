"""The journal: the contents of a job's event stream when the job is delivered again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from llorch_worker.contract.errors import InternalError
from llorch_worker.contract.events import (
    TERMINAL_EVENTS,
    CancelledEvent,
    Event,
    Failed,
    Finished,
    Restarted,
    Started,
    Tokens,
    Vectors,
)
from llorch_worker.contract.result import TokenLogprobs


@dataclass(frozen=True, slots=True)
class JournalledChoice:
    """One choice so far: its ids in order, the text, thought and calls that readers have, its
    logprobs.

    ``logprobs``: one entry per id, or None if the events have none. ``calls``: the arguments of
    each call.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    thought: str = ""
    calls: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # Journals end up in logs by accident, but generated text must not.
        return f"<JournalledChoice of {len(self.token_ids)} tokens>"


@dataclass(frozen=True, slots=True)
class Journal:
    """The choices that have events, by number, and the first terminal event if there is one.

    False if there is nothing to resume from: no token, no text, no vector, no terminal event.
    """

    choices: Mapping[int, JournalledChoice] = field(default_factory=dict)
    terminal: Finished | Failed | CancelledEvent | None = None
    fingerprint: str | None = None
    """Of the model that the tokens are from; None if they are from several, which must not be."""
    arithmetic: tuple[str, ...] = ()
    """What computed them, in order."""
    prompt_tokens: int = 0
    restarted: bool = False
    """Whether tokens before these are void."""
    vectors: tuple[Vectors, ...] = ()
    """What a job's texts gave so far, each part after the one before."""

    def __bool__(self) -> bool:
        return bool(self.choices or self.vectors) or self.terminal is not None

    @property
    def begins_again(self) -> bool:
        """Whether tokens were void, and none has come since."""
        return self.restarted and not self

    @property
    def computed(self) -> int:
        """The number of texts that are in ``vectors``."""
        return self.vectors[-1].index + self.vectors[-1].count if self.vectors else 0

    @property
    def most_tokens(self) -> int:
        """The number of tokens of the longest choice."""
        return max((len(choice.token_ids) for choice in self.choices.values()), default=0)


def read_journal(events: Iterable[Event]) -> Journal:
    """Combines the events of all attempts into one journal.

    Raises:
        InternalError: a choice's tokens have a gap or an overlap, or logprobs for some only.
    """
    drafts: dict[int, _Draft] = {}
    vectors: list[Vectors] = []
    terminal = started = None
    restarted = False
    computed_by: dict[Started | None, None] = {}
    for event in events:
        if isinstance(event, Restarted):
            drafts, terminal, computed_by, restarted = {}, None, {}, True
            vectors = []
        elif isinstance(event, Started):
            started = event
        elif isinstance(event, Tokens):
            drafts.setdefault(event.choice, _Draft(event.choice)).take(event)
            computed_by[started] = None
        elif isinstance(event, Vectors):
            _follow(vectors, event)
            computed_by[started] = None
        elif isinstance(event, TERMINAL_EVENTS) and terminal is None:
            terminal = event
    models = {each.model_fingerprint if each else "" for each in computed_by or [started]}
    return Journal(
        {number: draft.finish() for number, draft in drafts.items()},
        terminal,
        models.pop() if len(models) == 1 else None,
        tuple(dict.fromkeys(each.arithmetic for each in computed_by if each)),
        started.prompt_tokens if started else 0,
        restarted,
        tuple(vectors),
    )


def _follow(vectors: list[Vectors], event: Vectors) -> None:
    computed = vectors[-1].index + vectors[-1].count if vectors else 0
    if event.index != computed:
        raise InternalError(
            f"the journal has vectors from {event.index} on after those of {computed} texts"
        )
    vectors.append(event)


@dataclass(slots=True)
class _Draft:
    number: int
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: dict[int, str] = field(default_factory=dict)

    def take(self, event: Tokens) -> None:
        if event.index != len(self.ids):
            what = "a gap" if event.index > len(self.ids) else "an overlap"
            raise InternalError(
                f"the journal of choice {self.number} has {what}: "
                f"tokens from {event.index} on follow {len(self.ids)} tokens"
            )
        self.ids += event.ids
        self.texts.append(event.text)
        self.thoughts.append(event.reasoning_content or "")
        for part in event.tool_calls or ():
            self.calls[part.index] = self.calls.get(part.index, "") + part.arguments
        self.logprobs += event.logprobs or ()
        # An event may have text without ids, and then without logprobs.
        if len(self.logprobs) not in (0, len(self.ids)):
            raise InternalError(
                f"the journal of choice {self.number} has {len(self.ids)} tokens "
                f"and the log probabilities of {len(self.logprobs)}"
            )

    def finish(self) -> JournalledChoice:
        return JournalledChoice(
            tuple(self.ids),
            "".join(self.texts),
            tuple(self.logprobs) if self.logprobs else None,
            "".join(self.thoughts),
            tuple(self.calls.values()),
        )
