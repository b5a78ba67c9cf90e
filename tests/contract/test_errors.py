"""Errors survive Celery's JSON backend."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from traceback import format_exception

import pytest

from llorch_worker.broker.jobs.results import decode_state, failure_document
from llorch_worker.contract import (
    ERROR_CLASSES,
    Fault,
    InternalError,
    InvalidRequest,
    ModelNotServed,
)
from llorch_worker.contract.errors import MOST_FAULTS, as_told, defect_of
from llorch_worker.contract.frames import forget_frames


@pytest.mark.parametrize("code", sorted(ERROR_CLASSES))
def test_an_error_is_rebuilt_from_its_args(code: str) -> None:
    fault = Fault(field="top_p", rule="must be positive", got="0")
    error = ERROR_CLASSES[code]("a sentence", faults=[fault])
    rebuilt = type(error)(*json.loads(json.dumps(error.args)))
    assert rebuilt.args == error.args
    assert rebuilt.document() == error.document()


def test_a_stock_app_reads_code_and_faults_from_args() -> None:
    error = InvalidRequest.from_faults([Fault(field="n", rule="at most 16", got="17")])
    message, code, retriable, faults = error.args
    assert message == "n: at most 16 (got 17)"
    assert (code, retriable) == ("INVALID_REQUEST", False)
    assert faults == [{"field": "n", "rule": "at most 16", "got": "17"}]


def test_no_more_faults_are_made_than_are_reported() -> None:
    made = 0

    def faults() -> Iterator[Fault]:
        nonlocal made
        for made in range(1, 1_000_000):
            yield Fault(field=f"tokens.{made}", rule="must be below 9", got="9")

    error = InvalidRequest.from_faults(faults())
    assert (len(error.faults), made) == (MOST_FAULTS, MOST_FAULTS + 1)
    assert error.message.endswith("; and more")


def test_a_model_is_worth_waiting_for_only_while_none_is_known() -> None:
    misspelt = ModelNotServed.never("dmeo", ["toy", "demo"])
    said = "no worker here has ever served 'dmeo' (known models: demo, toy); did you mean demo?"
    assert (misspelt.message, misspelt.retriable) == (said, False)
    first = ModelNotServed.never("demo", [])
    assert (first.message, first.retriable) == (
        "no worker here has ever served 'demo' (known models: none)", True,
    )  # fmt: skip


@pytest.mark.parametrize("retriable", [True, False])
def test_an_error_is_as_retriable_behind_the_queue_as_before_it(retriable: bool) -> None:
    end = decode_state(failure_document("job", ModelNotServed("why", retriable=retriable))).end
    assert isinstance(end, ModelNotServed)
    assert (end.retriable, end.document().retriable) == (retriable, retriable)


class Held:
    """Something that a frame holds."""


def test_a_defect_says_its_type_and_place_keeps_no_message_and_no_frame() -> None:
    def fail(held: Held) -> None:
        raise ValueError(f"a secret of {held}")

    held = Held()
    kept = weakref.ref(held)
    gc.disable()
    try:
        try:
            fail(held)
        except ValueError as error:
            told = as_told(error, "worker")
            forget_frames(error)
        del held
        assert kept() is None
    finally:
        gc.enable()
    assert (told.code, told.message) == ("INTERNAL", "a defect of the worker: ValueError")
    written = "".join(format_exception(told))
    assert "in fail" in written
    assert "a secret of <" not in written


def test_what_has_a_code_is_told_as_it_is_but_logged_as_a_defect_without_what_led_to_it() -> None:
    known = InternalError("known words")
    known.__cause__ = ValueError("a secret")
    assert as_told(known, "worker") is known
    written = "".join(format_exception(defect_of(known, "worker")))
    assert "a defect of the worker: InternalError" in written
    assert "ValueError" not in written
    assert as_told(MemoryError(), "worker").code == "OUT_OF_MEMORY"
