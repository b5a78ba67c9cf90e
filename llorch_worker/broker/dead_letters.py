"""Dead letters: messages that nobody will run by themselves, kept with the reason and history."""

from __future__ import annotations

import json
import time

from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.claims import Claim


def bury(client: Redis, claim: Claim, reason: str) -> None:
    """Keeps the message of a claim; ending the claim is the caller's."""
    letter = {
        "id": claim.job_id,
        "reason": reason,
        "message": claim.message.decode("utf-8", "replace"),
        "list": claim.list_key,
        "attempts": claim.attempt,
        "history": "",
        "at_ms": int(time.time() * 1e3),
    }
    client.lpush(keys.DEAD, json.dumps(letter))
