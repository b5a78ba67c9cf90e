"""Which drafter a sequence gets."""

from __future__ import annotations

from collections.abc import Callable

from llorch_worker.engine.drafting.drafter import Draft, Drafter
from llorch_worker.engine.drafting.prompt_lookup import PromptLookup
from llorch_worker.engine.drafting.recent_texts import RecentLookup, RecentTexts
from llorch_worker.engine_options import EngineOptions

DrafterMaker = Callable[[str | None, list[int]], Drafter]
"""Makes a drafter for a new sequence of a tenant, with the tokens of the request's prediction."""


def drafter_maker(options: EngineOptions) -> DrafterMaker:
    """The maker of one engine's drafters, which share its recent texts.

    The ``options`` say that there are drafts."""
    if options.drafter == "lookup":
        return lambda _, prediction: PromptLookup(prediction)
    texts = RecentTexts(options.suffix_bytes)
    return lambda tenant, prediction: BetterOf(
        PromptLookup(prediction), RecentLookup(texts, tenant)
    )


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
