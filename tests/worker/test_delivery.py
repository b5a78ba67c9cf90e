"""What a claimed message asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llorch_worker.broker.queues import route
from llorch_worker.worker.delivery import Delivery
from tests.broker.steps import claim_on


@pytest.mark.parametrize(
    ("queued", "field", "runs_as"),
    [
        ("high", None, "high"),
        ("normal", None, "normal"),
        ("low", None, "low"),
        ("normal", "high", "high"),
        ("low", "normal", "normal"),
        ("high", "low", "high"),
        ("high", "normal", "high"),
    ],
)
def test_a_job_has_the_priority_of_its_field_or_queue_and_in_the_high_queue_is_high(
    queued: str, field: str | None, runs_as: str
) -> None:
    claim = replace(claim_on("job"), list_key=route("toy", queued).list_key)  # type: ignore[arg-type]
    fields = {"prompt": "x"} if field is None else {"prompt": "x", "priority": field}
    assert Delivery(claim, fields).request().priority == runs_as
