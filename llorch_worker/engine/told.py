"""New tokens in the form in which an engine tells them: plain structs, of which each step makes
many. Whoever reads them makes events of the contract. Imports no torch."""

from __future__ import annotations

import msgspec

from llorch_worker.contract import TokenLogprob, TokenLogprobs, Tokens


class TokenScore(msgspec.Struct, array_like=True):
    """A :class:`.TokenLogprobs`, or a :class:`.TokenLogprob` among its alternatives."""

    id: int
    text: str
    logprob: float
    bytes: tuple[int, ...] | None
    top: list[TokenScore] = []

    @classmethod
    def of(cls, entry: TokenLogprobs) -> TokenScore:
        top = [cls(other.id, other.text, other.logprob, other.bytes) for other in entry.top]
        return cls(entry.id, entry.text, entry.logprob, entry.bytes, top)

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


class TokensTold(msgspec.Struct, array_like=True, tag="t"):
    """A :class:`.Tokens` without calls of tools, as nearly all are."""

    handle: int
    """What the board calls the generation."""
    choice: int
    index: int
    ids: list[int]
    text: str
    thought: str | None = None
    scores: list[TokenScore] | None = None

    def event(self) -> Tokens:
        scores = self.scores
        return Tokens(
            choice=self.choice,
            index=self.index,
            ids=tuple(self.ids),
            text=self.text,
            reasoning_content=self.thought,
            logprobs=None if scores is None else tuple(each.entry() for each in scores),
        )
