"""The work of one step: which sequences compute how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from llorch_worker.engine.sequence import Sequence


# A struct takes a third of the time that a dataclass takes to make: a step may make hundreds.
class Chunk(msgspec.Struct, gc=False):
    """``count`` pending tokens of one sequence, from position ``start``, and the ``drafts`` that
    may follow them. Nothing changes it."""

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last of its tokens that are no drafts."""
        return self.start + self.count

    @property
    def rows(self) -> int:
        """Tokens that the step computes."""
        return self.count + len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token and the step samples the next."""
        sequence = self.sequence
        # A chunk planned ahead may compute a token that is not known yet.
        return sequence.samples and self.start + self.count >= len(sequence.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step: first ``decodes`` chunks of sampled tokens, then prefill chunks.

    A decode has one token, those that a grammar forced after it, and drafts.
    """

    chunks: tuple[Chunk, ...]
    decodes: int
    rows: int = field(init=False)
    """Tokens that the step computes, drafts included."""
    has_drafts: bool = field(init=False)

    def __post_init__(self) -> None:
        drafts = sum([len(chunk.drafts) for chunk in self.chunks])
        rows = sum([chunk.count for chunk in self.chunks]) + drafts
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "has_drafts", drafts > 0)

    @property
    def prefills(self) -> tuple[Chunk, ...]:
        """The chunks that begin or continue a prefill."""
        return self.chunks[self.decodes :]
