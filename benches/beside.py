"""What decoding keeps of its speed beside processes that want the same processors.

    python -m benches.beside --model FILE [--sequences 1,8] [--busy 1,2] [--peer llama.cpp]

Each pass measures alone, then beside each number of busy loops in Python; passes repeat. Figures
are tokens/s, and in brackets the share of the speed alone: medians. Threads spin as a worker's do.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benches.command import heading, main, row
from benches.peers.contestants.contestant import LLAMA_CPP, LLORCH, Terms, Work
from benches.peers.contestants.process import ContestantProcess
from llorch_worker.bench.load import Load
from llorch_worker.cli.bench.parameters import parse_numbers
from llorch_worker.worker.card.assignment import limit_spinning

PROMPT_TOKENS = 32
MOST = 256


def beside(
    model: Annotated[Path, typer.Option("--model", help="A .gguf file.")],
    sequences: Annotated[str, typer.Option("--sequences", help="How many at once.")] = "1,8",
    busy: Annotated[str, typer.Option("--busy", help="Busy processes, beside none.")] = "1,2",
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=3)] = 64,
    passes: Annotated[int, typer.Option("--passes", min=1)] = 3,
    threads: Annotated[int, typer.Option("--threads", min=1)] = 2,
    peer: Annotated[str | None, typer.Option("--peer", help=f"Such as {LLAMA_CPP}.")] = None,
) -> None:
    """Decode alone and beside busy processes, in turns."""
    limit_spinning()
    counts = parse_numbers("--sequences", sequences, MOST)
    neighbours = (0, *(parse_numbers("--busy", busy, MOST) if busy else ()))
    terms = Terms(
        model=model.resolve(),
        dtype="bfloat16",
        threads=threads,
        most_sequences=max(counts),
        context_tokens=PROMPT_TOKENS + new_tokens,
        prefill_tokens=PROMPT_TOKENS,
    )
    names = (LLORCH, *([] if peer is None else [peer]))
    heading("engine", "sequences", "alone", *(f"+{n}" for n in neighbours[1:]))
    with ExitStack() as stack:
        engines = [stack.enter_context(ContestantProcess(name, terms)) for name in names]
        for count in counts:
            for engine in engines:
                engine.warm_up(_work(count, new_tokens, 0))
            rates: dict[tuple[str, int], list[float]] = {}
            for number in range(passes):
                for beside in neighbours:
                    for engine in engines:
                        with _busy(beside):
                            # Once before: an engine may need a second to find its threads.
                            engine.run(_work(count, new_tokens, 1000 + number))
                            rate = engine.run(_work(count, new_tokens, number + 1))
                        rates.setdefault((engine.name, beside), []).append(rate.tokens_per_s)
            for name in names:
                speeds = [median(rates[name, beside]) for beside in neighbours]
                shares = [f"{speed:.1f} ({speed / speeds[0]:.2f})" for speed in speeds[1:]]
                row(name, count, f"{speeds[0]:.1f}", *shares)


def _work(sequences: int, new_tokens: int, seed: int) -> Work:
    requests = Load.alike(sequences, PROMPT_TOKENS, new_tokens, seed).requests(1000)
    prompts = tuple(tuple(each.prompt_token_ids or ()) for each in requests)
    return Work("decode", prompts, new_tokens, seed)


@contextmanager
def _busy(processes: int) -> Iterator[None]:
    """Runs loops that never wait, each in its own process."""
    loop = "print(flush=True)\nwhile True: pass"
    running = [
        subprocess.Popen([sys.executable, "-c", loop], stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    try:
        for each in running:
            assert each.stdout is not None
            each.stdout.readline()
        yield
    finally:
        for each in running:
            each.send_signal(signal.SIGKILL)
            each.communicate()


if __name__ == "__main__":
    main(beside, "beside")
