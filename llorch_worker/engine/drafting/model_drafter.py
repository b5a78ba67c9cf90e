"""Drafts of one sequence that a draft model computes."""

from __future__ import annotations

from itertools import accumulate, repeat
from operator import mul
from typing import Final

from llorch_worker.engine.drafting.drafter import FROM_MODEL, Draft, Drafter

PRIOR: Final = 0.8
"""How likely a guess is to hold if nothing is known: high, because a few guesses show the truth."""
RATE: Final = 1 / 8
"""How much a guess counts for its own sequence."""
SHARED_RATE: Final = 1 / 16
"""How much it counts for sequences to come."""
FORGETTING: Final = 1 / 512
"""How much a token without a guess counts, as a share of a guess: it moves an estimate back to
``PRIOR``. So a model that was wrong is tried again now and then."""


class Trust:
    """How likely a draft model's next guess is to hold."""

    def __init__(self, chance: float = PRIOR) -> None:
        self.chance = chance

    def note(self, held: bool, rate: float) -> None:
        """A guess has been checked."""
        self.chance += (held - self.chance) * rate

    def forget(self, tokens: int, rate: float) -> None:
        """So many tokens have come without a guess."""
        self.chance += (PRIOR - self.chance) * min(1.0, tokens * FORGETTING * rate)


class ModelDrafter(Drafter):
    """Says how many guesses may pay. :class:`.DraftModel` computes those that the step wants."""

    def __init__(self, worker: Trust, max_context: int, vocab_size: int) -> None:
        """``worker``: of all sequences. The draft model reads ``max_context`` tokens at most, with
        ids below ``vocab_size``."""
        self._worker = worker
        self._own = Trust(worker.chance)
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._known = 0
        self._guess: list[int] = []
        self.computed = 0
        """Tokens whose keys and values of the draft model the sequence's blocks hold."""

    def propose(self, token_ids: list[int], most: int) -> Draft | None:
        """See ``Drafter``."""
        self._follow(token_ids[self._known :])
        most = min(most, self._max_context - len(token_ids))
        if most <= 0:
            return None
        behind = max(1, len(token_ids) - self.computed)
        chances = list(accumulate(repeat(self._own.chance, most), mul))
        return Draft([FROM_MODEL] * most, chances, behind)

    def lose_blocks(self) -> None:
        """See ``Drafter``."""
        self.computed = 0
        self._guess = []

    def guessed(self, token_ids: list[int]) -> None:
        """The draft model has computed all tokens of the sequence, and these after them."""
        self.computed, self._guess = self._known, token_ids

    def _follow(self, fresh: list[int]) -> None:
        if not fresh:
            return
        first = not self._known
        self._known += len(fresh)
        if max(fresh) >= self._vocab_size:
            self._max_context = 0
        guess, self._guess = self._guess, []
        if first:
            return
        if not guess:
            self._own.forget(len(fresh), RATE)
            self._worker.forget(len(fresh), SHARED_RATE)
            return
        held = 0
        for guessed, token_id in zip(guess, fresh, strict=False):
            self._own.note(guessed == token_id, RATE)
            self._worker.note(guessed == token_id, SHARED_RATE)
            if guessed != token_id:
                break
            held += 1
        # The draft model has not computed the last guess, because nothing was guessed after it.
        self.computed += min(held, len(guess) - 1)
