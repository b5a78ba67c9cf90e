"""What the programs of a stack are given."""

from __future__ import annotations

import pytest

from llorch_worker.settings import Settings
from llorch_worker.stack import programs

BUCKETS = "FLOWER_TASK_RUNTIME_METRIC_BUCKETS"


def test_flower_shows_jobs_as_the_operator_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BUCKETS, raising=False)
    ours = programs.flower(5555, Settings(), None).environment
    assert ours[BUCKETS] == programs.FLOWER_DEFAULTS[BUCKETS]
    monkeypatch.setenv(BUCKETS, "1,2")
    # The child inherits it.
    assert BUCKETS not in programs.flower(5555, Settings(), None).environment
