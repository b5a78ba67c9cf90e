"""What texts that are embedded beside it cost what a model generates.

    python -m benches.texts_beside --model FILE [--sequences 4] [--tokens 96] [--passes 3]

One engine, in a process of its own as a worker's, generates for a few jobs alone, then while lists
of texts are embedded without a pause, of the class normal and of the class low, by turns. The gaps
are those between two tokens of a sequence, as their worker hears of them while they are read; the
ratios are to those of the same pass without texts. A step of texts is the longest gap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import typer

from benches.command import heading, main, row
from llorch_worker.contract import EmbedRequest, GenerationRequest
from llorch_worker.engine.process.engine_process import EngineProcess
from llorch_worker.engine.told import TokensTold
from llorch_worker.intake.process import IntakeProcess

TIMEOUT_S = 600
LISTS = 2
"""That are in the engine at once."""
TEXT = "a table has many rows and each is a text of its own length "


def texts_beside(
    model: Annotated[Path, typer.Option(help="A model that generates.")],
    sequences: int = 4,
    tokens: Annotated[int, typer.Option(min=3)] = 96,
    passes: int = 3,
    threads: int | None = None,
    step_tokens: Annotated[int | None, typer.Option(help="LLORCH_MAX_STEP_TOKENS")] = None,
) -> None:
    """Measure the gaps between tokens without texts and beside them."""
    options: dict[str, Any] = {
        "device": "cpu",
        "pooling": "last",
        "max_context": 1024,
        "max_sequences": sequences,
        "max_step_tokens": step_tokens,
        "drafter": "off",
        "num_threads": threads,
    }
    with (
        IntakeProcess(model) as intake,
        EngineProcess.load(model, intake=intake, **options) as engine,
    ):
        engine.warm_up()
        _gaps(engine, sequences, 3, seed=0)
        heading(
            "pass",
            "texts",
            "median gap, ms",
            "p95 gap, ms",
            "longest",
            "p95, ratio",
            "texts embedded",
        )
        ratios: dict[str, list[float]] = {"normal": [], "low": []}
        for number in range(1, passes + 1):
            alone = _gaps(engine, sequences, tokens, seed=number)
            row(number, "none", *_shown(alone), "", "")
            for priority, found in ratios.items():
                with _texts(engine, priority) as embedded:
                    gaps = _gaps(engine, sequences, tokens, seed=number)
                    texts = sum(embedded)
                found.append(_p95(gaps) / _p95(alone))
                row(number, priority, *_shown(gaps), f"{found[-1]:.2f}", texts)
        said = ", ".join(f"{name} {median(found):.2f}" for name, found in ratios.items())
        print(f"median ratio of p95: {said}", flush=True)


def _shown(gaps: list[float]) -> tuple[str, str, str]:
    return f"{median(gaps):.1f}", f"{_p95(gaps):.1f}", f"{max(gaps):.1f}"


def _p95(gaps: list[float]) -> float:
    return quantiles(gaps, n=20)[-1]


def _gaps(engine: EngineProcess, sequences: int, tokens: int, *, seed: int) -> list[float]:
    """Milliseconds between the tokens of each sequence."""
    heard: list[list[float]] = [[] for _ in range(sequences)]
    running = [
        engine.submit(
            GenerationRequest(
                prompt=f"{number} Once upon a time", max_tokens=tokens, ignore_eos=True, seed=seed
            ),
            on_event=lambda _: None,
            on_tokens=partial(_note, times),
        )
        for number, times in enumerate(heard)
    ]
    for generation in running:
        generation.note_read(True)
    for generation in running:
        generation.result(TIMEOUT_S)
    return [1e3 * (after - before) for times in heard for before, after in pairwise(times)]


def _note(times: list[float], _: TokensTold) -> None:
    times.append(time.perf_counter())


@contextmanager
def _texts(engine: EngineProcess, priority: Any) -> Iterator[list[int]]:
    """Embeds lists meanwhile. Gives how many texts each had that has ended."""
    embedded: list[int] = []
    over = threading.Event()
    request = EmbedRequest(input=[TEXT * (1 + at % 8) for at in range(16)], priority=priority)

    def embed() -> None:
        while not over.is_set():
            engine.submit(request, on_event=lambda _: None).result(TIMEOUT_S)
            embedded.append(len(request.input))

    threads = [threading.Thread(target=embed) for _ in range(LISTS)]
    for thread in threads:
        thread.start()
    try:
        yield embedded
    finally:
        over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(texts_beside, "texts_beside")
