"""The NVIDIA cards of this machine, as the driver lists them. Uses no torch and no CUDA context."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.installing import install_command
from llorch_worker.engine_options import SEQUENCES

VISIBLE = "CUDA_VISIBLE_DEVICES"


class DeviceUnavailable(ModelLoadFailed):
    """The requested device is missing or cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Card:
    """One card; ``index`` is the number that ``nvidia-smi`` shows, which may differ from CUDA's."""

    index: int
    uuid: str | None
    """``GPU-…``; None if the driver does not report it."""
    model: str
    free_bytes: int | None
    """None, like ``total_bytes``, if the card has no memory of its own: it shares the machine's."""
    total_bytes: int | None
    fault: str | None = None
    """The reason why the driver cannot reach it; None if the card works."""

    @property
    def name(self) -> str:
        """``gpu3``: in worker names, Flower, stats and lock files."""
        return f"gpu{self.index}"

    @property
    def cuda_id(self) -> str:
        """Its name in ``CUDA_VISIBLE_DEVICES``; a UUID is unambiguous, unlike a number."""
        return self.uuid or str(self.index)


def list_cards() -> tuple[Card, ...]:
    """All cards by index, including unreachable ones, which have a ``fault``.

    Raises:
        DeviceUnavailable: there is no driver, or it does not respond.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        raise DeviceUnavailable(
            f"cards cannot be listed without nvidia-ml-py: {install_command('worker')}"
        ) from None
    try:
        pynvml.nvmlInit()
        try:
            return tuple(_card(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise DeviceUnavailable(
            f"no NVIDIA driver responds ({error}); check `nvidia-smi`, or use device cpu"
        ) from None


def _card(nvml: ModuleType, index: int) -> Card:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = _memory(nvml, handle)
        model = str(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return Card(index, None, "unknown", None, None, fault=str(error))
    try:
        uuid = str(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        uuid = None
    return Card(index, uuid, model, *memory)


def _memory(nvml: ModuleType, handle: Any) -> tuple[int | None, int | None]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:  # as on GB10
        return None, None
    return int(memory.free), int(memory.total)


def visible_cards(cards: tuple[Card, ...], visible: str | None) -> tuple[Card, ...]:
    """The cards that ``CUDA_VISIBLE_DEVICES`` selects, in its order; ``cuda:N`` is the N-th.

    As in CUDA, an unknown or repeated entry hides itself and all later ones. Numbers are those of
    ``nvidia-smi``.

    Args:
        visible: the variable's value; None if it is not set, which makes all cards visible.

    Raises:
        DeviceUnavailable: it names a part of a card (MIG).
    """
    if visible is None:
        return cards
    chosen: list[Card] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):
            raise DeviceUnavailable(
                "CUDA_VISIBLE_DEVICES names a part of a card (MIG); a worker needs a whole card"
            )
        card = _named(cards, entry)
        if card is None or card in chosen:
            break
        chosen.append(card)
    return tuple(chosen)


def usable_cards() -> tuple[Card, ...]:
    """The cards that workers of this process' environment may take, in ``cuda:N`` order.

    Raises:
        DeviceUnavailable: there is no driver, or no card is visible.
    """
    visible = os.environ.get(VISIBLE)
    cards = visible_cards(list_cards(), visible)
    if not cards:
        why = "this machine has none" if visible is None else f"{VISIBLE} is {visible!r}"
        raise DeviceUnavailable(f"no NVIDIA card is visible: {why}; use device cpu")
    return cards


def no_such_card(number: int, count: int) -> DeviceUnavailable:
    """The error for ``cuda:<number>`` on a machine with ``count`` cards."""
    return DeviceUnavailable(
        f"device cuda:{number} does not exist; the last card here is cuda:{count - 1}"
    )


def _named(cards: tuple[Card, ...], entry: str) -> Card | None:
    if entry.isdecimal():
        return next((card for card in cards if card.index == int(entry)), None)
    # A prefix of a UUID is enough if only one card has it.
    found = [card for card in cards if entry and card.uuid and card.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def default_sequences(device: str) -> int:
    """How many sequences a worker with this ``device`` takes at most, if no number is set."""
    if device == "auto":
        device = "cuda" if has_card() else "cpu"
    return SEQUENCES.get(device.partition(":")[0], SEQUENCES["cpu"])


def has_card() -> bool:
    """Whether workers with the device ``auto`` take cards."""
    if not torch_has_cuda():
        return False
    try:
        usable_cards()
    except DeviceUnavailable:
        return False
    return True


def torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build. Reads its files, because visible devices must be
    chosen before torch is imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    # ``cuda: Optional[str] = '13.0'``, or ``= None``.
    named = re.compile(r"^cuda\b[^=\n]*= *['\"]", re.MULTILINE)
    return version.exists() and named.search(version.read_text()) is not None
