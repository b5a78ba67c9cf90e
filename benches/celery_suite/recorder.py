"""A pytest plugin that bounds each test's time and writes each outcome at once.

A test that hangs even in its teardown ends the process, and the suite goes on in a new one.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from benches.celery_suite.reasons import reason_of

FIXTURES_S = 45.0
"""How long a test's fixtures may take beyond the test's own limit."""
HUNG = 70
"""Exit code of a process that ended because a test hung."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    group.addoption("--suite-results", help="file for the outcomes, one JSON document a line")
    group.addoption("--suite-timeout", type=float, help="seconds a test may take")
    group.addoption("--suite-hopeless-timeout", type=float, help="and one that is known to fail")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--suite-results"):
        config.pluginmanager.register(Recorder(config))


class Recorder:
    """See the module's docstring."""

    def __init__(self, config: pytest.Config) -> None:
        self._results = Path(config.getoption("--suite-results"))
        self._timeout_s: float = config.getoption("--suite-timeout")
        self._hopeless_timeout_s: float = config.getoption("--suite-hopeless-timeout")
        self._outcome, self._message = "passed", ""
        self._watch: threading.Timer | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            # First, so that it counts more than the test's own mark of 300 s. Without the
            # fixtures: the worker of all tests may start in one that is known to fail.
            limit_s = self._limit_s(item.nodeid)
            item.add_marker(pytest.mark.timeout(limit_s, func_only=True), append=False)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            reason = str(report.longrepr).strip().splitlines()[-1]
            self._write(report.nodeid, "not collected", reason)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome, self._message = "passed", ""
        limit_s = self._limit_s(nodeid) + FIXTURES_S
        self._watch = threading.Timer(limit_s, self._give_up, [nodeid])
        self._watch.daemon = True
        self._watch.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome = "failed"
            self._message = self._message or _last_line(report.longrepr)
        elif report.skipped and self._outcome == "passed":
            self._outcome = "failed as expected" if hasattr(report, "wasxfail") else "skipped"
            self._message = _last_line(report.longrepr)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._write(nodeid, self._outcome, self._message)

    def _limit_s(self, nodeid: str) -> float:
        return self._timeout_s if reason_of(nodeid) is None else self._hopeless_timeout_s

    def _give_up(self, nodeid: str) -> None:
        self._write(nodeid, "failed", f"hung. {self._message}")
        os._exit(HUNG)

    def _write(self, nodeid: str, outcome: str, message: str) -> None:
        with self._results.open("a") as sink:
            print(json.dumps([nodeid, outcome, message]), file=sink)


def _last_line(longrepr: Any) -> str:
    """The error in one line, or the reason of a skip."""
    if isinstance(longrepr, tuple):
        return str(longrepr[2])
    crash = getattr(longrepr, "reprcrash", None)
    text = str(longrepr) if crash is None else str(crash.message)
    return (text.strip() or "?").splitlines()[0]
