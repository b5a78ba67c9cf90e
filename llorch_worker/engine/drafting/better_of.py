"""Two drafters for one sequence."""

from __future__ import annotations

from llorch_worker.engine.drafting.drafter import Draft, Drafter


class BetterOf(Drafter):
    """Takes the draft that promises more tokens."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._drafters = (first, second)

    def propose(self, token_ids: list[int], most: int) -> Draft | None:
        """See ``Drafter``."""
        drafts = (drafter.propose(token_ids, most) for drafter in self._drafters)
        return max(filter(None, drafts), key=lambda draft: sum(draft.chances), default=None)

    def end(self, generated_ids: list[int]) -> None:
        """See ``Drafter``."""
        for drafter in self._drafters:
            drafter.end(generated_ids)
