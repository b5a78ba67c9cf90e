"""NVIDIA's driver library as it would be on a machine with the cards of a JSON file.

``FAKE_CARDS`` names the file: a list of ``{"uuid", "model", "free", "total", "fault"?}``. Without
the file there is no driver. It is read at each call, so a test can let a card or the driver die.
"""

import json
import os
from types import SimpleNamespace


class NVMLError(Exception):
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
    return SimpleNamespace(free=card["free"], total=card["total"])


def nvmlDeviceGetName(card):
    return card["model"]


def nvmlDeviceGetUUID(card):
    if card["uuid"] is None:
        raise NVMLError("Not Supported")
    return card["uuid"]
