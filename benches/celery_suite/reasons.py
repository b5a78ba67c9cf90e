"""Why a test of Celery's suite cannot pass here."""

from __future__ import annotations

import re

ONE_ID = (
    "a task that retries or replaces itself sends a second message with its id; here that is a "
    "copy of the job, and dropped"
)
ONE_RUN = "an id runs once: a canvas that is sent again with the same ids is a copy, and dropped"
KEPT = "every job's result is stored, wanted or not, because its stream ends with it"
TIME_LIMIT = "tasks have no time limits; a job has a deadline_s"
HIDDEN = "inspect and logs show the sizes of arguments and never the arguments"
QUEUES = "a worker serves the queues of its model, by their names"
DUE = "a job with an ETA waits in Redis; a worker gets it when it is due, without the ETA"
ONE_TTL = "LLORCH_RESULT_TTL_S holds for every result, failures included"
BYTES = "the backend's connection gives bytes, whatever decode_responses in its URL says"

_REASONS = {
    r"(canvas|tasks)\.py.*(replace|_retr[iy]|second_order|test_complex_chain)": ONE_ID,
    # Their add_to_all replaces itself.
    r"test_chord::test_(group_chain|group_kwargs|group_args_and_kwargs|single_task_header"
    r"|empty_header_chord|nested_chord)$": ONE_ID,
    r"reapplying_frozen": ONE_RUN,
    r"test_mutable_errback_called_by_chord_from_(chain|chain_tail|group)\[": ONE_RUN,
    r"test_ignore_result|uses_task_ignore_result|_ignore_result_true": KEPT,
    r"soft_timeout": TIME_LIMIT,
    r"test_Inspect::test_active$|test_query_task|test_trace_log_arguments": HIDDEN,
    r"test_active_queues": QUEUES,
    r"test_scheduled|test_group_or_task_countdown": DUE,
    r"test_failure_expires": ONE_TTL,
    r"test_decode_responses": BYTES,
}


def reason_of(test: str) -> str | None:
    """The reason why ``test``, a node id, cannot pass, or ``None``."""
    return next((why for pattern, why in _REASONS.items() if re.search(pattern, test)), None)
