"""``llorch top``: what the fleet does, live."""

from __future__ import annotations

from llorch_worker.cli.options import (
    DEFAULT_INTERVAL_S,
    IntervalOption,
    JsonOption,
    settings_options,
)
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.settings import Settings

ALL_LINES = 1_000_000
SHOWN_JOBS = 60


@settings_options("redis_url")
def top(
    interval: IntervalOption = DEFAULT_INTERVAL_S,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Show the fleet live: queues, workers, tokens/s, KV use, percentiles of recent jobs.

    A screen of 40 lines also has the last hour, as the gateways keep it, and the jobs that run and
    wait.

    Keys: q quits, s sorts the workers. Workers' figures are up to 5 s old. Recent jobs are those
    that ended in the last 5 minutes. If stdout is not a terminal, everything is shown once. With
    --json, one document a line is printed until Ctrl-C.
    """
    from llorch_worker.broker.figures.fleet_client import FleetClient
    from llorch_worker.cli.fleet_reading import FleetReader, print_lines
    from llorch_worker.cli.fleet_screen import FleetScreen, top_head
    from llorch_worker.cli.fleet_tables import workers_table
    from llorch_worker.cli.terminal.live_screen import is_screen

    screen = Screen(as_json=as_json)
    with FleetClient(settings.redis_url) as client:
        on_screen = is_screen(screen.out) and not as_json
        reader = FleetReader(client, jobs=SHOWN_JOBS if on_screen else 0)
        if as_json:
            print_lines(screen, reader, interval)
        elif on_screen:
            FleetScreen(screen.out, reader, settings.redis_url, "llorch top", top_head).run(
                interval
            )
        else:
            console, reading = screen.wide, reader.last
            for part in top_head(console, reading, lines=ALL_LINES):
                console.print(part)
            console.print("", workers_table(reading.fleet.workers), sep="\n")
            screen.note("Shown once: this is not a terminal. --json prints a line every interval.")
