"""Errors survive Celery's JSON backend."""

from __future__ import annotations

import json

import pytest

from llorch_worker.contract import (
    ERROR_CLASSES,
    Fault,
    InvalidRequest,
)


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
