"""What guessed tokens gain: pairs with and without, in one process, and that no token differs.

    python -m benches.speculation --model FILE [--sequences 1,8] [--threads 2]

Two engines of one file alternate. Repeating texts answer thirty chats that ask for code with an
edit, for JSON of a text, or for quotes of it; free texts answer ten open questions; for predicted
ones each request brings as its ``prediction`` the answer itself, without every tenth word.
Everything is greedy, but for half of the free texts. Exit code 1 if a token differs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, repeat
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benches.command import heading, main, row
from benches.speculation_prompts import FREE, REPEATING
from llorch_worker.bench.instruments.alternating import alternate
from llorch_worker.contract import GenerationRequest, GenerationResult, Message
from llorch_worker.engine import Engine
from llorch_worker.engine_options import DrafterChoice

TIMEOUT_S = 600
SHARES = ("accepted", "held")


@dataclass(frozen=True)
class Pass:
    tokens_per_s: float
    texts: list[tuple[int, ...]]
    accepted: float
    """The share of its tokens that were guessed."""
    held: float
    """The share of the guesses that became tokens."""


def speculation(
    model: Annotated[Path, typer.Option("--model", help="A .gguf file or a folder.")],
    sequences: Annotated[str, typer.Option("--sequences", help="How many at once.")] = "1,8,16,32",
    chats: Annotated[int, typer.Option("--chats", min=1, help="Of each kind, for one.")] = 30,
    tokens: Annotated[int, typer.Option("--tokens", min=2)] = 100,
    passes: Annotated[int, typer.Option("--passes", min=1)] = 3,
    threads: Annotated[int | None, typer.Option("--threads")] = None,
    way: Annotated[str, typer.Option("--drafter", help="lookup or suffix")] = "lookup",
) -> int:
    """Decode speed with and without guesses, and their ratio: medians of alternating passes."""
    if way not in ("lookup", "suffix"):
        raise typer.BadParameter("must be lookup or suffix", param_hint="--drafter")
    counts = [int(count) for count in sequences.split(",")]
    kind: DrafterChoice = "suffix" if way == "suffix" else "lookup"
    ways: tuple[DrafterChoice, DrafterChoice] = ("off", kind)
    engines = [
        Engine.load(
            model,
            device="cpu",
            max_context=1024,
            max_sequences=max(counts),
            drafter=each,
            num_threads=threads,
        )
        for each in ways
    ]
    different = 0
    heading("text", "sequences", "off, tokens/s", "on, tokens/s", "ratio", "guessed", "held")
    for engine in engines:
        engine.warm_up()
    for count in counts:
        for name, prompts in (("repeating", REPEATING), ("free", FREE), ("predicted", REPEATING)):
            requests = _requests(name, list(islice(cycle(prompts), max(count, chats))), tokens)
            if name == "predicted":
                requests = _predicted(engines[0], requests)
            # Once before, so that both find the prompts in their prefix caches.
            for engine in engines:
                _run(engine, requests, count, tokens=2)
            off_run, on_run = (partial(_run, engine, count=count) for engine in engines)
            pairs = list(alternate(off_run, on_run, repeat(requests, passes)))
            different += sum(off.texts != on.texts for off, on in pairs)
            off, on = (median(pair[i].tokens_per_s for pair in pairs) for i in (0, 1))
            ratio = median(on.tokens_per_s / off.tokens_per_s for off, on in pairs)
            shares = [median(getattr(on, share) for _, on in pairs) for share in SHARES]
            speeds = f"{off:.1f}", f"{on:.1f}", f"{ratio:.2f}"
            row(name, count, *speeds, *(f"{share:.0%}" for share in shares))
    for engine in engines:
        engine.close()
    print(f"{different} passes with other tokens")
    return int(different > 0)


def _requests(name: str, prompts: list[str], tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            messages=(Message(role="user", content=prompt),),
            max_tokens=tokens,
            temperature=0.8 if name == "free" and number % 2 else 0,
            seed=number,
        )
        for number, prompt in enumerate(prompts)
    ]


def _predicted(engine: Engine, requests: list[GenerationRequest]) -> list[GenerationRequest]:
    answers = [engine.submit(request).result(TIMEOUT_S).text.split(" ") for request in requests]
    return [
        request.model_copy(update={"prediction": " ".join(_without_every_tenth(words))})
        for request, words in zip(requests, answers, strict=True)
    ]


def _without_every_tenth(words: list[str]) -> list[str]:
    return [word for number, word in enumerate(words, 1) if number % 10]


def _run(
    engine: Engine, requests: list[GenerationRequest], count: int, tokens: int | None = None
) -> Pass:
    """All requests, ``count`` at once. Alone, the time is that from the first token on."""
    results: list[GenerationResult] = []
    seconds = 0.0
    drafted = engine.stats().draft_tokens_total
    for first in range(0, len(requests), count):
        batch = requests[first : first + count]
        if tokens is not None:
            batch = [request.model_copy(update={"max_tokens": tokens}) for request in batch]
        begun_s = time.perf_counter()
        running = [engine.submit(request) for request in batch]
        ended = [generation.result(TIMEOUT_S) for generation in running]
        took_s = time.perf_counter() - begun_s
        seconds += ended[0].timings.decode_ms / 1e3 if count == 1 else took_s
        results += ended
    completion = sum(result.usage.completion for result in results)
    accepted = sum(result.usage.accepted_draft_tokens for result in results)
    return Pass(
        tokens_per_s=completion / max(seconds, 1e-9),
        texts=[choice.token_ids for result in results for choice in result.choices],
        accepted=accepted / completion,
        held=accepted / max(1, engine.stats().draft_tokens_total - drafted),
    )


if __name__ == "__main__":
    main(speculation, "speculation")
