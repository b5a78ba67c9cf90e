"""Simulates NVIDIA's driver library for the cards in the JSON file that ``FAKE_CARDS`` names.

The file is a list of ``{"uuid", "model", "free", "total", "fault"?}``, null where the driver does
not know; without it there is no driver. Each call reads it anew, so a test can let a card or the
driver fail.
"""

import json
import os
from types import SimpleNamespace


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):  # noqa: N801 - as in nvidia-ml-py
    pass


def _cards():
    try:
        with open(os.environ["FAKE_CARDS"]) as file:
            return json.load(file)
    except (KeyError, FileNotFoundError):
        raise NVMLError("Driver Not Loaded") from None


def nvmlInit():
    _cards()


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(_cards())


def nvmlDeviceGetHandleByIndex(index):
    card = _cards()[index]
    if card.get("fault"):
        raise NVMLError(card["fault"])
    return card


def nvmlDeviceGetMemoryInfo(card):
    if card["free"] is None:
        raise NVMLError_NotSupported("Not Supported")
    return SimpleNamespace(free=card["free"], total=card["total"])


def nvmlDeviceGetName(card):
    return card["model"]


def nvmlDeviceGetUUID(card):
    if card["uuid"] is None:
        raise NVMLError_NotSupported("Not Supported")
    return card["uuid"]
