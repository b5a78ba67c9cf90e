"""What a fleet costs Redis, and how soon and how evenly it claims.

    python -m benches.fleet [--workers 1,12,100] [--real 1,4] [--jobs 300]

Starts a redis-server for each line. Most workers are stubs, many in one process, with the
package's own claims, bells and watchers: see ``stubs.py``. ``--real`` starts whole workers with the
toy engine. Producers are ours, ours with 64 different beginnings of prompts ("placed"), and stock
ones. "Commands" are those that Redis executed, also inside scripts (``INFO commandstats``),
the producer's included; those of an idle fleet are subtracted. "Redis us" is the CPU time of its
process, likewise.
"""

from __future__ import annotations

import os
import platform
from typing import Annotated

import typer

from benches.command import main
from benches.fleet import measures


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def fleet(
    workers: Annotated[str, typer.Option(help="Numbers of stubs.")] = "1,12,100",
    real: Annotated[str, typer.Option(help="Numbers of whole workers.")] = "1,4",
    jobs: Annotated[int, typer.Option(help="Jobs one by one, ten a second.")] = 300,
    crowd: Annotated[int, typer.Option(help="Stubs of the other measurements.")] = 100,
    fast: Annotated[int, typer.Option(help="Jobs a second of the fast line.")] = 500,
) -> None:
    """Measure fleets of stubs and of whole workers."""
    print(f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, Python "
          f"{platform.python_version()}")  # fmt: skip
    print(
        f"{'workers':>12} {'producer':>8} {'jobs/s':>7} {'commands':>9} {'Redis us':>9}"
        f" {'waits':>6} {'claimed p50':>12} {'p99 ms':>8} {'idle/s':>7}  jobs a worker"
    )

    def line(count: int, kind: str, producer: str, *, rate: float, count_jobs: int) -> None:
        real = kind == "real"
        found = measures.steady(count, producer, rate=rate, jobs=count_jobs, real=real)
        print(
            f"{count:>7} {kind} {producer:>8} {found.jobs_per_s:7.1f}"
            f" {found.commands:9.1f} {found.cpu_us:9.0f} {found.wakes:6.2f} {found.p50_ms:12.2f}"
            f" {found.p99_ms:8.2f} {found.idle_commands:7.1f}  {found.jobs_a_worker}",
            flush=True,
        )

    for kind, counts in (("real", _numbers(real)), ("stub", _numbers(workers))):
        for count in counts:
            for producer in measures.PRODUCERS:
                line(count, kind, producer, rate=10, count_jobs=jobs)
    for producer in measures.PRODUCERS:
        line(crowd, "stub", producer, rate=fast, count_jobs=10 * fast)
    for name, measure in (("at once", measures.burst), ("as all start", measures.start)):
        found = measure(crowd, 500, 16)
        print(f"{found.jobs} jobs {name}, {crowd} stubs: claimed in {found.claimed_s:.3f} s; "
              f"jobs a worker {found.jobs_a_worker}; {found.commands:.1f} commands and "
              f"{found.wakes:.2f} waits a job", flush=True)  # fmt: skip
    took_s = measures.half_die(crowd, 400, 4)
    print(f"half of {crowd} stubs die with 200 jobs (lease 5 s): all 400 jobs ended after "
          f"{took_s:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main(fleet, "fleet")
