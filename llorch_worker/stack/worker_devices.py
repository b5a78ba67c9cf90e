"""The devices on which ``llorch up`` starts workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from llorch_worker import processors
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.contract.quantities import counted
from llorch_worker.devices import Card, DeviceUnavailable, torch_has_cuda, usable_cards
from llorch_worker.worker.card.assignment import chosen_cards

ALL = "all"


@dataclass(frozen=True)
class WorkerDevices:
    """The (name, device) of each worker, and the cards among the devices."""

    workers: tuple[tuple[str, str], ...]
    cards: tuple[Card, ...] = ()

    @property
    def mixture(self) -> str | None:
        """The models of mixed cards: ``2 x NVIDIA H200, 1 x NVIDIA A10``; None for equal cards."""
        models = Counter(card.model for card in self.cards)
        if len(models) < 2:
            return None
        return ", ".join(f"{count} x {model}" for model, count in models.items())


def worker_devices(
    device: str,
    *,
    gpus: str | None,
    devices: str | None,
    workers: int | None,
    models: int = 1,
) -> WorkerDevices:
    """The workers to start and their devices. A card gets one worker, which is named after it.

    Args:
        device: used if no list is given; ``auto`` is every card, or the CPU if there is none.
        gpus: ``all``, or card numbers such as ``0,2``.
        devices: a list such as ``cuda:0,cuda:1`` or ``cpu,cpu``.
        workers: the number of workers, if no list is given; by default each card gets one, or
            without a card each of the processor's sockets.
        models: the number of models; each needs a worker.

    Raises:
        CommandError: a list has an empty, repeated or wrong name, both lists are given,
            ``workers`` disagrees with the list, or there are fewer workers than ``models``.
        DeviceUnavailable: no driver, no such card, or no card that responds.
    """
    if gpus is not None and devices is not None:
        raise usage_error("--gpus and --devices both place workers: give only one of them")
    if gpus is not None:
        chosen = _numbered(gpus)
    elif devices is not None:
        chosen = [part.strip() for part in devices.split(",")]
        if not all(chosen):
            raise usage_error(f"--devices {devices!r} has an empty name: give cuda:0,cuda:1 or cpu")
    else:
        chosen = _default(device, workers, models)
    if workers is not None and workers != len(chosen):
        raise usage_error(
            f"--workers {workers} disagrees with {counted(len(chosen), 'device')}: a card takes "
            "one worker, and a list starts one worker per entry"
        )
    if len(chosen) < models:
        raise usage_error(
            f"{models} models need as many workers, and there is a place for {len(chosen)}: a card "
            "takes one worker, and --devices cpu,cpu starts two on the CPU"
        )
    return _named(chosen)


def _numbered(gpus: str) -> list[str]:
    if gpus == ALL:
        return _that_respond(usable_cards())
    numbers = [part.strip() for part in gpus.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise usage_error(f"--gpus must be all or card numbers such as 0,2 (got {gpus!r})")
    return [f"cuda:{int(number)}" for number in numbers]


def _that_respond(cards: Sequence[Card]) -> list[str]:
    found = [f"cuda:{number}" for number, card in enumerate(cards) if card.fault is None]
    if not found:
        faults = ", ".join(f"{card.name}: {card.fault}" for card in cards)
        raise DeviceUnavailable(f"no card responds ({faults}); see llorch doctor")
    return found


def _default(device: str, workers: int | None, models: int) -> list[str]:
    on_cpu = ["cpu"] * (workers or max(models, processors.sockets()))
    if device == "cpu":
        return on_cpu
    if device not in ("auto", "cuda"):
        return [device] * (workers or 1)
    try:
        if device == "auto" and not torch_has_cuda():
            raise DeviceUnavailable("this torch is built without CUDA")
        cards = usable_cards()
    except DeviceUnavailable:
        if device == "cuda":
            raise
        return on_cpu
    # The CPU takes over where there is no card, and not where all fail.
    return _that_respond(cards)[:workers]


def _named(devices: list[str]) -> WorkerDevices:
    cards: list[Card] = []
    workers = []
    for index, device in enumerate(devices):
        kind, _, number = device.partition(":")
        if kind == "cuda" and number.isdecimal():
            (card,) = chosen_cards(int(number))
            if card in cards:
                raise usage_error(f"{device} is listed twice: a card takes one worker")
            cards.append(card)
            workers.append((card.name, device))
        else:
            workers.append(("worker" if len(devices) == 1 else f"worker-{index}", device))
    return WorkerDevices(tuple(workers), tuple(cards))
