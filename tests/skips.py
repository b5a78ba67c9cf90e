"""Skipped tests: what each needs, said once and counted at the end.

``@pytest.mark.lacks("needs a processor with AMX", when=condition)`` marks a test that this machine
cannot run if the condition holds. All tests with the same words count as one skip, which says how
many they are.
"""

from __future__ import annotations

from collections import Counter

import pytest


def one_skip_for_each_lack(items: list[pytest.Item]) -> None:
    """Keep the first of the tests that lack the same, skipped, and drop the others."""
    lacking: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("lacks")
        if mark is not None and mark.kwargs["when"]:
            lacking.setdefault(mark.args[0], []).append(item)
    for reason, alike in lacking.items():
        stands_for = f" ({len(alike)} tests)" if len(alike) > 1 else ""
        alike[0].add_marker(pytest.mark.skip(reason=reason + stands_for))
    dropped = {id(item) for alike in lacking.values() for item in alike[1:]}
    items[:] = [item for item in items if id(item) not in dropped]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The number of skipped tests for each reason, the most frequent first."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        assert isinstance(report.longrepr, tuple), report.longrepr
        reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("skipped, and what would run them")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:>5}  {reason}")
