"""Who may see and end what was made over HTTP: the key that made it, and operators.

A job's record in Redis, a file's, a batch's and a response's each name their owner.
"""

from __future__ import annotations

from llorch_worker.gateway.keys import Caller

NOBODY = "/"
"""The owner of a job whose text is not to be read any more, or is only its caller's. No key has
this name."""


def may(caller: Caller, owner: str | None) -> bool:
    """``owner``: the name of a key; None for what was not made over HTTP, which operators see. A
    gateway without keys takes everyone for an operator."""
    return owner != NOBODY and (caller.operator or owner == caller.name)
