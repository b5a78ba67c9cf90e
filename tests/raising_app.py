"""A toy worker in which a step between the queue and the task raises what a message asks for.

The message's header ``raises`` names the step and the class: ``strategy decimal.InvalidOperation``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llorch_worker.broker.celery.backend import ResultBackend
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.messages import body, message
from llorch_worker.worker.celery import consumer, job_message
from llorch_worker.worker.celery.request import JobRequest
from llorch_worker.worker.celery.task import RequestTask
from llorch_worker.worker.delivery import Delivery
from tests.raising import make
from tests.toy_app import app as app


def _raise(step: str, wanted: object) -> None:
    asked, _, name = str(wanted or "").partition(" ")
    if asked == step:
        raise make(name)


def _raising(
    step: str, real: Callable[..., Any], headers_of: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        _raise(step, headers_of(*args, **options).get("raises"))
        return real(*args, **options)

    return run


def _of_raw(raw: bytes, *_: Any) -> dict[str, Any]:
    try:
        headers: dict[str, Any] = json.loads(raw)["headers"]
    except (ValueError, TypeError, LookupError):
        return {}
    return headers


_decoders = dict(body._DECOMPRESS)


def _decompress(raw: bytes, most: int) -> tuple[bytes, bool]:
    _raise("decompress", raw.decode(errors="replace"))
    return _decoders["application/x-gzip"](raw, most)


def _typed(value: dict[str, Any]) -> Any:
    if value["__type__"] == "raising":
        raise make(value["__value__"])
    return _object_hook(value)


_object_hook = body.object_hook
body.object_hook = _typed
body._DECOMPRESS["application/x-gzip"] = _decompress  # type: ignore[index]
claims.reread = _raising("reread", message.reread, _of_raw)
job_message.read_envelope = _raising("envelope", message.read_envelope, _of_raw)
consumer.fault_of = _raising("fault", consumer.fault_of, lambda found: found.headers)
Delivery.request = _raising(  # type: ignore[method-assign]
    "arguments", Delivery.request, lambda job: _of_raw(job.claim.message)
)


_store = ResultBackend.store_result


def _store_result(backend: Any, *args: Any, request: Any = None, **options: Any) -> Any:
    _raise("report", getattr(request, "raises", None))
    return _store(backend, *args, request=request, **options)


ResultBackend.store_result = _store_result


class RaisingRequest(JobRequest):
    def __init__(self, found: Any, **options: Any) -> None:
        _raise("request", found.headers.get("raises"))
        super().__init__(found, **options)


RequestTask.Request = f"{__name__}:{RaisingRequest.__name__}"
_start = RequestTask.start_strategy


def _start_strategy(task: Any, *args: Any, **options: Any) -> Any:
    return _raising("strategy", _start(task, *args, **options), lambda found, *_: found.headers)


RequestTask.start_strategy = _start_strategy
