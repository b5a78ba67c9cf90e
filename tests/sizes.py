"""How much the tests try: little by default, much with ``LLORCH_FULL_SIZE=1``."""

from __future__ import annotations

import os
from typing import TypeVar

FULL_SIZE = bool(os.environ.get("LLORCH_FULL_SIZE"))

T = TypeVar("T")


def sized(usual: T, full: T) -> T:
    """``usual``, or ``full`` in a run of full size."""
    return full if FULL_SIZE else usual
