"""``python -m benches.celery_suite --sdist DIR``: test by test, this package beside stock Celery.

DIR is Celery's unpacked source distribution, of the version that is installed:
``pip download celery==<version> --no-binary celery --no-deps``. All files take about an hour.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from benches.celery_suite.reasons import reason_of
from benches.celery_suite.suite import OURS, STOCK, Limits, Outcome, files_of, run

HOPELESS_S = 3.0
"""What a test gets that is known to fail; most of them would wait for ever."""
FAILED, NOT_COLLECTED = "failed", "not collected"


def main() -> int:
    """Exit code 1 if a test fails that stock Celery passes, or a file of tests cannot be read, and
    no reason is known; or if no test ran in our worker that should."""
    options = _options()
    files = options.files or files_of(options.sdist)
    folder: Path = options.logs or Path(tempfile.mkdtemp(prefix="celery-suite-logs-"))
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, dict[str, Outcome]] = {}
    for contestant in (OURS, STOCK) if options.only is None else (options.only,):
        hopeless_s = HOPELESS_S if contestant == OURS else options.timeout
        limits = Limits(options.timeout, min(options.timeout, hopeless_s))
        for outcome in run(options.sdist, contestant, files, options.k, limits, folder):
            outcomes.setdefault(outcome.test, {})[contestant] = outcome
            line = f"{contestant}: {outcome.test} {outcome.verdict} {outcome.message[:150]}"
            print(line, file=sys.stderr, flush=True)
    if options.json:
        plain = {t: {c: asdict(o) for c, o in of.items()} for t, of in outcomes.items()}
        print(json.dumps(plain, indent=2))
    else:
        _print_table(outcomes)
    print(f"pytest's output: {folder}", file=sys.stderr)
    idle = options.only != STOCK and not any(OURS in of for of in outcomes.values())
    return int(idle or any(_is_unexplained(test, of) for test, of in outcomes.items()))


def _is_unexplained(test: str, of: dict[str, Outcome]) -> bool:
    verdicts = {contestant: outcome.verdict for contestant, outcome in of.items()}
    ours = verdicts.get(OURS)
    failed_here_alone = ours in (FAILED, NOT_COLLECTED) and ours != verdicts.get(STOCK)
    return failed_here_alone and reason_of(test) is None


def _print_table(outcomes: dict[str, dict[str, Outcome]]) -> None:
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for test, of in outcomes.items():
        verdicts = [of[c].verdict if c in of else "-" for c in (OURS, STOCK)]
        why = (reason_of(test) or "NO KNOWN REASON") if verdicts[0] == FAILED else ""
        why = "stock fails too" if verdicts == [FAILED, FAILED] else why
        print(f"{verdicts[0]:18} {verdicts[1]:18} {test}{'  # ' if why else ''}{why}")
        for contestant, verdict in zip((OURS, STOCK), verdicts, strict=True):
            counts.setdefault(test.partition("::")[0], Counter())[contestant, verdict] += 1
    for file, count in counts.items():
        for contestant in (OURS, STOCK):
            of_file = {v: n for (c, v), n in count.items() if c == contestant and v != "-"}
            if of_file:
                print(f"{file:48} {contestant:6}", *(f"{n} {v}" for v, n in of_file.items()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.celery_suite", description=__doc__)
    add = parser.add_argument
    add("files", nargs="*", help="files of tests, such as test_canvas.py; default: all")
    add("--sdist", type=Path, required=True, metavar="DIR", help="Celery's source distribution")
    add("-k", default="", metavar="EXPRESSION", help="only these tests; see pytest's -k")
    add("--only", choices=(OURS, STOCK))
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds that a test may take")
    add("--json", action="store_true", help="print one JSON document")
    add("--logs", type=Path, metavar="FOLDER", help="folder for pytest's output")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
