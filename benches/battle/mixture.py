"""What a user of Celery does besides plain jobs, as a function of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from benches.battle.ledger import CANCELLED, POISON, STOCK
from benches.battle.schedule import CLIENT, ELSEWHERE, REVOKE, TERMINATE, Cancel, Order

SHARES = {
    "plain": 0.24,
    "ours": 0.24,
    "countdown": 0.15,
    "cancel": 0.16,
    "chord": 0.11,
    "chain": 0.094,
    "poison": 0.006,
}
LONGEST_COUNTDOWN_S = 20.0
LATEST_CANCEL_S = 8.0
WAYS_TO_CANCEL = (CLIENT, CLIENT, REVOKE, TERMINATE, ELSEWHERE)
POISONS = ("die", "die at 40")
POISON_TOKENS = 100


def mixed(plain: Iterator[Order], seed: int) -> Iterator[tuple[Order, ...]]:
    """What to send in one go: one job, or a chord's parts and its body, or the two of a chain."""
    dice = random.Random(f"mixture {seed}")
    kinds, shares = tuple(SHARES), tuple(SHARES.values())
    for order in plain:
        match dice.choices(kinds, shares)[0]:
            case "countdown":
                yield (_later(order, dice),)
            case "cancel":
                late = dice.random() < 0.5
                how = dice.choice(WAYS_TO_CANCEL)
                first = _later(order, dice) if late else order
                yield (_cancelled(first, dice.uniform(0, LATEST_CANCEL_S), how),)
            case "chord":
                parts = [order, next(plain)]
                if dice.random() < 0.3:
                    # Cancelled long before it is due.
                    waits = replace(next(plain), countdown_s=LONGEST_COUNTDOWN_S)
                    how = dice.choice(WAYS_TO_CANCEL)
                    parts.append(_cancelled(waits, dice.uniform(0, LATEST_CANCEL_S), how))
                yield (*parts, _after(parts, next(plain), dice))
            case "ours":
                fields = _ours(dice)
                low = fields["priority"] == "low"
                yield (replace(order, ours=fields, job=replace(order.job, is_low=low)),)
            case "chain":
                yield order, _after([order], next(plain), dice)
            case "poison":
                job = replace(order.job, kind=POISON, tokens=POISON_TOKENS)
                yield (replace(order, job=job, poison=dice.choice(POISONS)),)
            case _:
                yield (order,)


def _ours(dice: random.Random) -> dict[str, str]:
    fields = {"priority": dice.choice(("high", "normal", "low"))}
    if dice.random() < 0.5:
        fields["tenant"] = dice.choice("abc")
    if dice.random() < 0.5:
        fields["affinity_key"] = dice.choice("xyz")
    return fields


def _later(order: Order, dice: random.Random) -> Order:
    return replace(order, countdown_s=dice.uniform(1, LONGEST_COUNTDOWN_S))


def _cancelled(order: Order, after_s: float, how: str) -> Order:
    return replace(order, job=replace(order.job, kind=CANCELLED), cancel=Cancel(after_s, how))


def _after(parts: list[Order], last: Order, dice: random.Random) -> Order:
    """``last``, which begins when ``parts`` have succeeded: one of our jobs, or a stock task."""
    job = replace(last.job, after=tuple(part.job.id for part in parts))
    stock = dice.random() < 0.5
    return replace(last, job=replace(job, kind=STOCK, tokens=0) if stock else job)
