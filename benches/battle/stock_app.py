"""The control: the same jobs on stock Celery, configured as a careful user would.

It uses late acknowledgement, a visibility timeout as short as our lease plus sweep and checked
every 2 s, one task per slot, and retries when Redis is away. The task streams the same tokens in
the same events and returns them.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis
from celery import Celery
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.contract import TASK_NAME
from tests.toy_engine import STEP_MS_VARIABLE
from tests.toy_generation import token_id

URL = os.environ["LLORCH_REDIS_URL"]
VISIBILITY_TIMEOUT_S = 15
RESTORE_INTERVAL_S = 2
STREAM_TTL_S = 24 * 3600
FLUSH_TOKENS = 8

app = Celery("stock", broker=URL, backend=URL)
app.conf.update(
    accept_content=["json"],
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_track_started=True,
    worker_prefetch_multiplier=1,
    worker_send_task_events=True,
    broker_transport_options={
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
        # By default a worker looks for lapsed messages 10 s after its start and then every 100 s,
        # which would only make the control slow.
        "unacked_restore_interval": RESTORE_INTERVAL_S,
        "unacked_restore_throttle": 1,
        "socket_timeout": 15,
        "socket_keepalive": True,
    },
    result_backend_always_retry=True,
    result_expires=STREAM_TTL_S,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
)
streams = redis.Redis.from_url(URL, socket_timeout=15)


@app.task(  # type: ignore[untyped-decorator]
    name=TASK_NAME,
    bind=True,
    autoretry_for=(RedisError,),
    retry_backoff=True,
    retry_backoff_max=5,
    max_retries=None,
)
def generate(task: Any, *, prompt: str, max_tokens: int, seed: int) -> dict[str, Any]:  # noqa: ARG001
    """Generates ``max_tokens`` tokens at the toy's pace."""
    step_s = float(os.environ[STEP_MS_VARIABLE]) / 1e3
    job_id, worker = task.request.id, task.request.hostname
    _write(job_id, "started", worker=worker)
    for index in range(0, max_tokens, FLUSH_TOKENS):
        positions = range(index, min(index + FLUSH_TOKENS, max_tokens))
        time.sleep(step_s * len(positions))
        ids = [token_id(seed, position) for position in positions]
        _write(job_id, "tokens", index=index, ids=ids)
    _write(job_id, "finished")
    return {"choices": [{"token_ids": [token_id(seed, i) for i in range(max_tokens)]}]}


def _write(job_id: str, kind: str, **fields: Any) -> None:
    pipe = streams.pipeline()
    pipe.xadd(keys.events(job_id), {"event": json.dumps({"type": kind} | fields)})
    pipe.expire(keys.events(job_id), STREAM_TTL_S)
    pipe.execute()
