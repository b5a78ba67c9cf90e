"""Assigns a device to this process before torch is loaded."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from llorch_worker.devices import (
    VISIBLE,
    Card,
    DeviceUnavailable,
    has_card,
    no_such_card,
    usable_cards,
)
from llorch_worker.worker.card.lock import CardLocks, Holder

ORDER = "CUDA_DEVICE_ORDER"
_CARD = re.compile(r"cuda(?::(\d+))?")

SPINS = "GOMP_SPINCOUNT"
SPIN_COUNT = "20000"
"""How often an OpenMP thread looks for more work before it sleeps.

This bridges the gaps within an engine step. With the default of 300,000 threads would still spin
after the step, when Redis and the clients need the processor.
"""
WAIT_POLICY = "OMP_WAIT_POLICY"


@dataclass(frozen=True)
class Assignment:
    """The device of this process. ``device`` is torch's name for it: for a card always ``cuda:0``,
    because torch sees only one."""

    device: str
    card: Card | None = None
    lock: int | None = None
    """The descriptor of the card's lock: see :meth:`.CardLocks.take`."""

    @property
    def name(self) -> str:
        """``gpu3`` for a card, else the device: for names, Flower and stats."""
        return self.device if self.card is None else self.card.name


def assign_device(device: str, locks: Path, *, worker: str | None = None) -> Assignment:
    """Takes the card that ``device`` names and makes it the only one that torch will see.

    ``cuda:N`` is the N-th card of those in ``CUDA_VISIBLE_DEVICES``. ``cuda`` and ``auto`` mean the
    first card that no other worker has. ``auto`` is the CPU only if this machine has no card or
    this torch has no CUDA. Any other name is passed on to the engine.

    Call it before torch is loaded: CUDA and OpenMP read the environment once.

    Args:
        locks: the folder of :class:`CardLocks`.
        worker: this worker's name, to be shown as the card's holder; by default the card's name.

    Raises:
        DeviceUnavailable: no driver, no such card, or another worker has it.
    """
    limit_spinning()
    match = _CARD.fullmatch(device)
    if device == "auto":
        if not has_card():
            return Assignment("cpu")
        # If there are cards but none works, falling back to the CPU would hide the problem.
        cards = chosen_cards(None)
    elif match is None:
        return Assignment(device)
    else:
        cards = chosen_cards(None if match[1] is None else int(match[1]))
    card, lock = _take(device, cards, CardLocks(locks), worker)
    os.environ[VISIBLE] = card.cuda_id
    os.environ[ORDER] = "PCI_BUS_ID"
    return Assignment("cuda:0", card, lock)


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets idle OpenMP threads sleep soon, unless the operator has set how they wait."""
    if WAIT_POLICY not in environment:
        environment.setdefault(SPINS, SPIN_COUNT)


def chosen_cards(number: int | None) -> tuple[Card, ...]:
    """The card ``cuda:<number>``, or every working card if ``number`` is None.

    Raises:
        DeviceUnavailable: no such card, or it does not answer.
    """
    cards = usable_cards()
    if number is None:
        working = tuple(card for card in cards if card.fault is None)
        if not working:
            raise DeviceUnavailable(f"no card works: {_faults(cards)}; check `nvidia-smi`")
        return working
    if number >= len(cards):
        raise no_such_card(number, len(cards))
    if cards[number].fault is not None:
        raise DeviceUnavailable(f"{_faults(cards[number : number + 1])}; check `nvidia-smi`")
    return (cards[number],)


def _take(
    device: str, cards: tuple[Card, ...], locks: CardLocks, worker: str | None
) -> tuple[Card, int]:
    for card in cards:
        holder = Holder(worker=worker or card.name, host=socket.gethostname(), pid=os.getpid())
        if (lock := locks.take(card, holder)) is not None:
            return card, lock
    holders = {card.name: locks.holder(card) or "a process that just left" for card in cards}
    held = ", ".join(f"{name} by {holder}" for name, holder in holders.items())
    if len(cards) == 1:
        raise DeviceUnavailable(f"device {device} already has a worker ({held}); a card takes one")
    raise DeviceUnavailable(
        f"each of the {len(cards)} cards already has a worker ({held}); a card takes one; "
        "start fewer workers, add cards, or use device cpu"
    )


def _faults(cards: tuple[Card, ...]) -> str:
    return ", ".join(f"{card.name} does not answer ({card.fault})" for card in cards)
