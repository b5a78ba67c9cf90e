"""Why a test of Celery's suite cannot pass here."""

from __future__ import annotations

import re

ONE_ID = "retries or replaces itself: a second message with the id of a job is a copy, and dropped"
KEPT = "wants no result; a job's result is always stored, because its stream ends with it"

_REASONS: dict[str, str] = {
    r"replace|_retr|retry": ONE_ID,
    r"test_ignore_result|uses_task_ignore_result": KEPT,
}


def reason_of(test: str) -> str | None:
    """The reason why ``test``, a node id, cannot pass, or ``None``."""
    return next((why for pattern, why in _REASONS.items() if re.search(pattern, test)), None)
