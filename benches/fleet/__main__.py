"""What a fleet costs Redis, and how soon and how evenly it claims.

    python -m benches.fleet [--workers 1,12,100] [--real 1,4] [--jobs 300]

Starts a redis-server for each line. Most workers are stubs, many in one process, with the
package's own claims, wake-ups and watchers: see ``stubs.py``. ``--real`` starts whole workers with
the toy engine. Producers are ours, ours with 64 different beginnings of prompts ("placed"), and
stock ones. "Commands" are those that Redis executed, also inside scripts (``INFO commandstats``),
the producer's included; those of an idle fleet are subtracted. "Redis us" is the CPU time of its
process, likewise.
"""

from __future__ import annotations

from typing import Annotated

import typer

from benches.command import heading, main, row
from benches.fleet import measures

CROWD, RATE, FAST_RATE = 100, 10, 500


def fleet(
    workers: Annotated[str, typer.Option(help="Numbers of stubs.")] = "1,12,100",
    real: Annotated[str, typer.Option(help="Numbers of whole workers.")] = "1,4",
    jobs: Annotated[int, typer.Option(help="Jobs one by one, ten a second.")] = 300,
    crowd: Annotated[int, typer.Option(help="Stubs of the other measurements.")] = CROWD,
) -> None:
    """Measure fleets of stubs and of whole workers."""
    heading(
        *("workers", "producer", "jobs/s", "commands a job", "Redis us a job", "waits a job"),
        *("claimed after p50, ms", "p99", "idle commands/s", "jobs a worker"),
    )
    stubs = [int(number) for number in workers.split(",") if number]
    fleets = [(int(number), True, RATE, jobs) for number in real.split(",") if number]
    fleets += [(number, False, RATE, jobs) for number in stubs]
    fleets += [(crowd, False, FAST_RATE, 10 * FAST_RATE)]
    for number, whole, rate, count in fleets:
        for producer in measures.PRODUCERS:
            figures = measures.steady(number, producer, rate=rate, jobs=count, real=whole)
            row(f"{number} {'whole' if whole else 'stubs'}", producer, *figures)
    for name, waiting in (("at once", False), ("as all start", True)):
        found = measures.burst(crowd, 500, 16, waiting=waiting)
        print(f"500 jobs {name}, {crowd} stubs: {found}", flush=True)
    took_s = measures.half_die(crowd, 400, 4)
    print(f"half of {crowd} stubs die with 200 jobs (lease 5 s): all 400 jobs ended after "
          f"{took_s:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main(fleet, "fleet")
