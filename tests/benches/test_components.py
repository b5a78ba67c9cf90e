"""``make bench``: the components run and agree with their plain formulas, at a small size each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
COMPONENTS = REPOSITORY / "benches/components"
SMALL = (
    "bfloat16-8] or tiny-1-modules or tiny-8-flat or warm-128-unified or greedy-peaked "
    "or warm-8] or native-1 or torch-1]"
)


def test_the_components_run_and_agree_with_their_formulas() -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(COMPONENTS), "--benchmark-disable"),
            *("-k", SMALL, "-v", "-p", "no:cacheprovider"),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    ran_files = set(re.findall(r"(bench_\w+\.py)::\S+ (?:PASSED|SKIPPED)", ran.stdout))
    assert ran_files == {path.name for path in COMPONENTS.glob("bench_*.py")}
