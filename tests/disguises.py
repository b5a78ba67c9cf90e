"""The forms in which a text may show in what should hold nothing of it."""

from __future__ import annotations

import base64
from collections.abc import Iterable


def assert_hidden(shown: str | bytes, secrets: Iterable[str]) -> None:
    """None of ``secrets`` shows: plain, or in base64 at any of the three alignments."""
    shown = shown.encode() if isinstance(shown, str) else shown
    for secret in secrets:
        assert secret.encode() not in shown
        for padding in range(3):
            assert base64.b64encode(b"\0" * padding + secret.encode())[4:-4] not in shown
