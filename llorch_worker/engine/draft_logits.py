"""The logits after the drafts of one step, and how far the drafts have held."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import torch

from llorch_worker.engine.sampling.sampler import Sampled, Sampler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.step_plan import Chunk


class DraftLogits:
    """Gives the rows of a step one by one, as if each token had had a step of its own.

    Row by row each sequence takes the token that the sampler chooses, with the counts, the grammar
    and the position that it then has. Its next row is that of the draft that was this token. The
    host makes this at the launch, ``keep`` runs on the device, the rest after it.
    """

    def __init__(self, chunks: Iterable[Chunk], sampler: Sampler) -> None:
        """``chunks`` in the order of their rows of logits; some have drafts."""
        self._sampler = sampler
        self._left: dict[Sequence, tuple[int, ...]] = {}
        """The drafts that may still hold."""
        self._ends: dict[Sequence, int] = {}
        """Where the rows of a sequence end."""
        self._rows = 0
        for chunk in chunks:
            if chunk.drafts:
                self._rows += len(chunk.drafts)
                self._left[chunk.sequence] = chunk.drafts
                self._ends[chunk.sequence] = self._rows
        self._logits: torch.Tensor | None = None

    def keep(self, logits: torch.Tensor) -> torch.Tensor:
        """Takes the rows of the drafts, the last of ``logits`` [rows, vocab], and returns the
        others."""
        undrafted = len(logits) - self._rows
        self._logits = logits[undrafted:]
        return logits[:undrafted]

    def take(self, sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[int, bool]:
        """How many of the tokens that ``sequence`` has just taken were drafts that held, and
        whether there is a row after the last of them."""
        drafts = self._left.get(sequence, ())
        held = 0
        for token_id, draft in zip(token_ids, drafts, strict=False):
            if token_id != draft:
                break
            held += 1
        self._left[sequence] = drafts[held:]
        return held, held == len(token_ids)

    def sample(self, sequences: Items[Sequence]) -> Sampled:
        """The next token of each of these, all of whose tokens were drafts so far."""
        assert self._logits is not None
        rows = [self._ends[sequence] - len(self._left[sequence]) - 1 for sequence in sequences]
        return self._sampler.sample(self._logits[rows], sequences)
