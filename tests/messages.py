"""Builds messages as kombu puts them on a list."""

from __future__ import annotations

import base64
import json
from typing import Any

from llorch_worker.contract import TASK_NAME

QUEUE = "llorch.toy"
GOOD_BODY: list[Any] = [[], {"prompt": "x", "max_tokens": 1}, {}]


def envelope(body: Any, /, *, headers: Any = None, **changes: Any) -> dict[str, Any]:
    """A message with ``body``; ``changes`` replace its parts."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return {
        "body": base64.b64encode(text).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"task": TASK_NAME, "id": "raw", "lang": "py"} if headers is None else headers,
        "properties": {
            "correlation_id": "raw",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": QUEUE},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "raw-tag",
        },
    } | changes
