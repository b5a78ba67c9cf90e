"""New tokens in the form in which an engine tells them: plain structs, of which each step makes
many. Whoever reads them makes events of the contract. Imports no torch.

The garbage collector need not look at them: they are no part of a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from llorch_worker.contract import CallPart, TokenLogprob, TokenLogprobs, Tokens


class TokenScore(msgspec.Struct, array_like=True, gc=False):
    """A :class:`.TokenLogprobs`, or a :class:`.TokenLogprob` among its alternatives."""

    id: int
    text: str
    logprob: float
    bytes: tuple[int, ...] | None
    top: tuple[TokenScore, ...] = ()

    @classmethod
    def of(cls, entry: TokenLogprobs) -> TokenScore:
        top = [cls(other.id, other.text, other.logprob, other.bytes) for other in entry.top]
        return cls(entry.id, entry.text, entry.logprob, entry.bytes, tuple(top))

    def entry(self) -> TokenLogprobs:
        return TokenLogprobs(
            id=self.id,
            text=self.text,
            logprob=self.logprob,
            bytes=self.bytes,
            top=tuple(
                TokenLogprob(id=each.id, text=each.text, logprob=each.logprob, bytes=each.bytes)
                for each in self.top
            ),
        )


class CallTold(msgspec.Struct, array_like=True):
    """A :class:`.CallPart`."""

    index: int
    id: str | None
    name: str | None
    arguments: str

    @classmethod
    def of(cls, part: CallPart) -> CallTold:
        return cls(part.index, part.id, part.name, part.arguments)

    def part(self) -> CallPart:
        return CallPart(index=self.index, id=self.id, name=self.name, arguments=self.arguments)


class TokensTold(msgspec.Struct, array_like=True, tag="t", gc=False):
    """A :class:`.Tokens`."""

    handle: int
    """What the board calls the generation; any number where there is no board."""
    choice: int
    index: int
    ids: list[int]
    text: str
    thought: str | None = None
    scores: list[TokenScore] | None = None
    calls: list[CallTold] | None = None

    def event(self) -> Tokens:
        scores, calls = self.scores, self.calls
        return Tokens(
            choice=self.choice,
            index=self.index,
            ids=tuple(self.ids),
            text=self.text,
            reasoning_content=self.thought,
            tool_calls=None if calls is None else tuple(each.part() for each in calls),
            logprobs=None if scores is None else tuple(each.entry() for each in scores),
        )

    def goes_on(self, last: TokensTold) -> bool:
        """Whether it can be joined to ``last``, of the same choice."""
        same_kind = (self.scores is None) == (last.scores is None)
        return same_kind and self.index == last.index + len(last.ids)


def joined(run: Sequence[TokensTold]) -> TokensTold:
    """Those of one choice that follow each other, in one."""
    first = run[0]
    if len(run) == 1:
        return first
    return TokensTold(
        handle=first.handle,
        choice=first.choice,
        index=first.index,
        ids=[token for part in run for token in part.ids],
        text="".join([part.text for part in run]),
        thought="".join([part.thought or "" for part in run]) or None,
        scores=None
        if first.scores is None
        else [score for part in run for score in part.scores or ()],
        calls=_joined_calls([call for part in run for call in part.calls or ()]),
    )


def _joined_calls(parts: Sequence[CallTold]) -> list[CallTold] | None:
    found: list[CallTold] = []
    for part in parts:
        if found and found[-1].index == part.index:
            last = found[-1]
            arguments = last.arguments + part.arguments
            found[-1] = CallTold(last.index, last.id, last.name, arguments)
        else:
            found.append(part)
    return found or None
