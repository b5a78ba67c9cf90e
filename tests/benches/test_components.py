"""``make bench``: the components run and agree with their plain formulas, each at a small size."""

from __future__ import annotations

import re

from tests.benches.program import run_program
from tests.services import REPOSITORY

COMPONENTS = REPOSITORY / "benches/components"
SMALL = "bfloat16-8] or greedy-peaked or warm-8]"


def test_the_components_run_and_agree_with_their_formulas() -> None:
    options = ("--benchmark-disable", "-k", SMALL, "-v", "-p", "no:cacheprovider")
    ran = run_program("pytest", str(COMPONENTS), *options)
    assert ran.code == 0, ran.out
    files = set(re.findall(r"(bench_\w+\.py)::\S+ (?:PASSED|SKIPPED)", ran.out))
    assert files == {path.name for path in COMPONENTS.glob("bench_*.py")}
