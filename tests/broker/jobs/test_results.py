from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.utils.json import dumps
from pydantic import ValidationError

from llorch_worker.broker.jobs.results import decode_state, terminal_event
from llorch_worker.contract import (
    Cancelled,
    CancelledEvent,
    Choice,
    ContextLengthExceeded,
    Failed,
    Fault,
    Finished,
    GenerationResult,
    InternalError,
    Timings,
    TokenLogprobs,
    Usage,
)
from llorch_worker.settings import Settings
from tests.services import RedisServer
from tests.store import stored_result

RESULT = GenerationResult(
    id="a",
    model="m",
    choices=(Choice(index=0, text="t", token_ids=(1,), finish_reason="stop"),),
    usage=Usage(prompt=1, completion=1),
    seed=0,
    timings=Timings(queue_ms=0, prefill_ms=0, first_token_ms=0, decode_ms=0),
    worker="w@h",
)


def meta(status: str, result: Any) -> str:
    return json.dumps({"status": status, "result": result, "task_id": "a"})


def error_meta(error: Exception) -> str:
    stored = {"exc_type": type(error).__name__, "exc_message": error.args, "exc_module": "x"}
    return meta("FAILURE", stored)


def test_nothing_stored_is_pending() -> None:
    assert decode_state(None).status == "PENDING"
    assert decode_state(None).end is None


def test_a_running_job_names_its_worker() -> None:
    state = decode_state(meta("STARTED", {"pid": 1, "hostname": "w@h"}))
    assert (state.end, state.worker) == (None, "w@h")


def test_a_result_comes_back_as_celery_stores_it() -> None:
    result = RESULT.model_copy(update={"metadata": {"é": [None, 2**70, {"🙂": "\u2028"}]}})
    assert decode_state(dumps({"status": "SUCCESS", "result": result})).end == result
    assert isinstance(terminal_event(result), Finished)


@pytest.mark.parametrize(
    ("text", "written"), [("é🙂", "é🙂"), ("é\ud83d", "é\\ud83d")], ids=["whole", "half"]
)
def test_a_result_is_stored_without_escapes_that_utf8_does_not_need(
    redis_server: RedisServer, store: redis.Redis, text: str, written: str
) -> None:
    backend = f"llorch_worker.broker.celery.backend:ResultBackend+{redis_server.url}"
    app = Celery(backend=backend, set_as_current=False)
    app.settings = Settings(redis_url=redis_server.url)
    app.backend.store_result("a", {"hostname": text}, "STARTED")
    document = stored_result(store, "a")
    assert isinstance(document, str)
    assert f'"{written}"' in document
    assert decode_state(document).worker == text
    app.close()


def test_an_invalid_stored_result_is_refused_with_the_field() -> None:
    stored = RESULT.__json__() | {"seed": "no number"}
    with pytest.raises(ValidationError, match="seed"):
        decode_state(meta("SUCCESS", stored))


def test_an_error_with_half_a_surrogate_pair_can_be_read() -> None:
    """A stranger's task name, say; JSON can escape it, and Unicode has no such thing."""
    end = decode_state(error_meta(KeyError("x\ud83d"))).end
    assert isinstance(end, InternalError)


def test_an_error_comes_back_as_its_own_class_with_its_faults() -> None:
    error = ContextLengthExceeded.from_faults([Fault(field="f", rule="r", got="g")])
    end = decode_state(error_meta(error)).end
    assert type(end) is ContextLengthExceeded
    assert end.faults == error.faults
    assert end.args == error.args
    event = terminal_event(end)
    assert isinstance(event, Failed)
    assert event.error.code == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize("error", [ValueError("x"), KeyError(), ValueError(1, "NO_CODE", 2, 3)])
def test_a_foreign_error_is_internal(error: Exception) -> None:
    assert isinstance(decode_state(error_meta(error)).end, InternalError)


def test_a_revoked_job_is_cancelled() -> None:
    end = decode_state(meta("REVOKED", {"exc_type": "TaskRevokedError"})).end
    assert isinstance(end, Cancelled)
    assert isinstance(terminal_event(end), CancelledEvent)


def test_python_runs_between_the_tokens_of_a_long_result() -> None:
    """Only there does the thread that decodes one let the event loop's run."""
    each = TokenLogprobs(id=1, text="a", logprob=-1.0)
    choice = Choice(
        index=0,
        text="",
        token_ids=(1,) * 100,
        finish_reason="stop",
        logprobs=(each,) * 100,
    )
    result = RESULT.model_copy(update={"choices": (choice,)})
    document = meta("SUCCESS", result.__json__())
    calls = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        end = decode_state(document).end
    finally:
        sys.setprofile(None)
    assert end == result
    assert calls >= 100
