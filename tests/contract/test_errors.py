"""Errors survive Celery's JSON backend."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from llorch_worker.broker.results import decode_state, failure_document
from llorch_worker.contract import (
    ERROR_CLASSES,
    Fault,
    InvalidRequest,
    ModelNotServed,
)
from llorch_worker.contract.errors import MOST_FAULTS


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
