"""The names of signals."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """``SIGKILL``, or ``SIGRTMIN+6``: of real-time signals Python names the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+d}"
