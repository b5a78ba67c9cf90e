"""Checks that model and cache are on their device, and that the device answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llorch_worker.devices import DeviceUnavailable, list_cards
from llorch_worker.worker.card.assignment import Assignment

if TYPE_CHECKING:
    from llorch_worker.engine.interface import ModelFacts
    from llorch_worker.worker.resident_engine import AnyEngine, ResidentEngine

MOST_NAMED = 3


def violation(engine: AnyEngine | ResidentEngine, assignment: Assignment) -> str | None:
    """The defect in one sentence, or None.

    Raises:
        TimeoutError: the engine does not answer now.
        EngineDied: nor ever.
    """
    device = engine.facts.device
    if assignment.card is not None and not device.startswith("cuda"):
        return f"the model should be on {assignment.name}, but is on {device}"
    misplaced = engine.misplaced_tensors()
    if misplaced:
        named = ", ".join(misplaced[:MOST_NAMED])
        more = f" and {len(misplaced) - MOST_NAMED} more" if len(misplaced) > MOST_NAMED else ""
        return f"not all of model and cache is on {device}: {named}{more}"
    return _card_fault(assignment)


def wrong_card(facts: ModelFacts, assignment: Assignment) -> str | None:
    """The reason why torch does not see exactly the assigned card, in one sentence, or None."""
    if assignment.card is None:
        return None
    if len(facts.card_uuids) != 1:
        count = len(facts.card_uuids)
        return f"torch must see only {assignment.name}, but it sees {count} cards"
    (seen,) = facts.card_uuids
    if assignment.card.uuid is not None and not assignment.card.uuid.endswith(seen):
        return f"{assignment.name} is {assignment.card.uuid}, but torch sees {seen}"
    return None


def _card_fault(assignment: Assignment) -> str | None:
    if assignment.card is None:
        return None
    try:
        cards = list_cards()
    except DeviceUnavailable as error:
        return error.message
    if any(card.cuda_id == assignment.card.cuda_id and card.fault is None for card in cards):
        return None
    # A card that does not answer does not report its UUID either.
    faults = [card.fault for card in cards if card.index == assignment.card.index and card.fault]
    return f"{assignment.name} does not answer ({faults[0] if faults else 'it is gone'})"
