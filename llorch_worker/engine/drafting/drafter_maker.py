"""Which drafter a sequence gets."""

from __future__ import annotations

from collections.abc import Callable

from llorch_worker.engine.drafting.better_of import BetterOf
from llorch_worker.engine.drafting.drafter import Drafter
from llorch_worker.engine.drafting.prompt_lookup import PromptLookup
from llorch_worker.engine.drafting.recent_texts import RecentLookup, RecentTexts
from llorch_worker.engine_options import Speculation

DrafterMaker = Callable[[str | None, list[int]], Drafter]
"""Makes a drafter for a new sequence of a tenant, with the tokens of the request's prediction."""


def drafter_maker(
    speculation: Speculation, suffix_bytes: int, by_model: Callable[[], Drafter] | None = None
) -> DrafterMaker | None:
    """The maker of one engine's drafters, which share its recent texts; None if there are none.

    ``by_model`` makes those of a draft model."""
    if speculation in ("auto", "off"):
        return None
    if by_model is not None:
        return lambda *_: by_model()
    if speculation == "lookup":
        return lambda _, prediction: PromptLookup(prediction)
    texts = RecentTexts(suffix_bytes)
    return lambda tenant, prediction: BetterOf(
        PromptLookup(prediction), RecentLookup(texts, tenant)
    )
