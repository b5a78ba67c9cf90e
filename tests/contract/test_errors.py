"""Errors keep their meaning on their way through Celery's JSON backend."""

from __future__ import annotations

import json

import pytest

from llorch_worker.contract import (
    ERROR_CLASSES,
    ErrorDocument,
    Fault,
    InvalidRequest,
    LlorchError,
    error_from_document,
)


@pytest.mark.parametrize("code", sorted(ERROR_CLASSES))
def test_an_error_is_rebuilt_from_its_args(code: str) -> None:
    fault = Fault(field="top_p", rule="must be positive", got="0")
    error = ERROR_CLASSES[code]("a sentence", faults=[fault])
    rebuilt = type(error)(*json.loads(json.dumps(error.args)))
    assert rebuilt.args == error.args
    assert rebuilt.document() == error.document()


@pytest.mark.parametrize("code", sorted(ERROR_CLASSES))
def test_an_error_is_rebuilt_from_its_document(code: str) -> None:
    error = ERROR_CLASSES[code]("a sentence")
    document = ErrorDocument.model_validate_json(error.document().model_dump_json())
    rebuilt = error_from_document(document)
    assert type(rebuilt) is type(error)
    assert rebuilt.args == error.args


def test_a_code_of_the_future_becomes_an_internal_error() -> None:
    document = ErrorDocument(code="NEW_IN_TWO", message="m", retriable=False)
    assert error_from_document(document).code == "INTERNAL"


def test_a_stock_app_reads_code_and_faults_from_args() -> None:
    error = InvalidRequest.from_faults([Fault(field="n", rule="at most 16", got="17")])
    message, code, retriable, faults = error.args
    assert message == "n: at most 16 (got 17)"
    assert (code, retriable) == ("INVALID_REQUEST", False)
    assert faults == [{"field": "n", "rule": "at most 16", "got": "17"}]


def test_every_error_is_a_llorch_error() -> None:
    assert all(issubclass(cls, LlorchError) for cls in ERROR_CLASSES.values())
