"""``python -m benches.battle``: ours, then stock Celery, with the same load and the same kills."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from benches.battle import report
from benches.battle.battle import QUIET_S, Outcome, Terms, fight
from benches.battle.contestant import OURS, Contestant, ours, stock

MODEST_RATE_PER_S = 4.0
ASKED_TO_STOP = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130


def main() -> int:
    """Exit code 1 if ours broke a promise, 130 after Ctrl-C."""
    options = _options()
    terms = Terms(
        minutes=options.minutes,
        kills=round(60 * options.minutes) if options.kills is None else options.kills,
        workers=options.workers,
        max_sequences=options.max_sequences,
        step_ms=options.step_ms,
        rate_per_s=options.rate,
        seed=options.seed,
        quiet_s=options.quiet,
        mixed=options.mixed,
    )
    for number in ASKED_TO_STOP:
        signal.signal(number, _interrupt)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="llorch-battle-"))
    outcomes: list[Outcome] = []
    worth_keeping = options.keep is not None
    try:
        for contestant in _contestants(options, terms):
            place = folder / contestant.name.replace(" ", "-")
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            outcomes.append(fight(contestant, terms, place))
        ours_broke = any(o.contestant == OURS and not o.findings.clean for o in outcomes)
        worth_keeping = worth_keeping or ours_broke
    except KeyboardInterrupt:
        print("interrupted; nothing is left running", file=sys.stderr)
        return INTERRUPTED
    except RuntimeError:
        worth_keeping = True
        raise
    finally:
        if worth_keeping:
            print(f"ledgers and logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(report.as_json(outcomes, terms), indent=2))
    else:
        report.print_table(outcomes, terms)
    return int(ours_broke)


def _contestants(options: argparse.Namespace, terms: Terms) -> list[Contestant]:
    both = not options.ours and not options.stock
    chosen = []
    if options.ours or both:
        chosen.append(ours(terms.max_sequences, terms.step_ms))
    if options.stock or both:
        chosen.append(stock(terms.max_sequences, terms.step_ms, options.pool))
    return chosen


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.battle", description=__doc__)
    add = parser.add_argument
    add("--ours", action="store_true", help="only ours")
    add("--stock", action="store_true", help="only stock Celery")
    add("--mixed", action="store_true", help="give ours also what users of Celery do besides")
    add("--pool", choices=("threads", "prefork"), default="threads", help="stock Celery's pool")
    add("--minutes", type=float, default=5.0, help="duration of load and kills")
    add("--kills", type=int, help="default: one a second")
    add("--workers", type=int, default=3)
    add("--max-sequences", type=int, default=4, help="jobs that a worker runs at once")
    add("--step-ms", type=float, default=8.0, help="time of a token for all running sequences")
    add("--rate", type=float, default=MODEST_RATE_PER_S, help="jobs a second")
    add("--seed", type=int, default=1, help="seed of jobs and kills")
    add("--quiet", type=float, default=QUIET_S, metavar="S", help="seconds of silence at the end")
    add("--json", action="store_true", help="print one JSON document")
    add("--keep", type=Path, metavar="FOLDER", help="folder for ledgers and logs")
    return parser.parse_args()


def _interrupt(*_: object) -> NoReturn:
    # Only once: a second Ctrl-C must not interrupt the cleanup.
    for number in ASKED_TO_STOP:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
