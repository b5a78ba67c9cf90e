"""A worker's memory plan against the memory that its process takes.

    python -m benches.memory_plan --model FILE.gguf [--sequences 4 --max-context 4096]

Prints what a token of the vocabulary takes, then the plan, and the process's peak after random
prompts have filled every sequence's context twice.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benches.command import main
from llorch_worker.allocator import return_freed_memory, use_one_arena
from llorch_worker.bench.instruments.process_memory import peak_resident_bytes
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.engine_options import EngineOptions
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary

NEW_TOKENS = 8


def memory_plan(
    model: Annotated[Path, typer.Option("--model", help="A .gguf file or a folder.")],
    sequences: Annotated[int, typer.Option("--sequences", min=1)] = 4,
    max_context: Annotated[int, typer.Option("--max-context", min=100)] = 4096,
    vocabulary_only: Annotated[bool, typer.Option("--vocabulary-only")] = False,
) -> None:
    """Compare a plan on the CPU with what the process takes."""
    use_one_arena()
    options = EngineOptions(device="cpu", max_sequences=sequences, max_context=max_context)
    plan = plan_load(model, options)
    if vocabulary_only:
        before = _resident_bytes()
        tokenizer = plan.tokenizer()
        loaded = _resident_bytes()
        size = plan.config.vocab_size
        grammar = ConstraintVocabulary(tokenizer, size, frozenset()).ll_tokenizer
        prepared = _resident_bytes()
        del grammar
        tokens = f"{size:,} tokens of {(loaded - before) / size:.0f} bytes"
        print(f"{tokens}, and {(prepared - loaded) / size:.0f} for grammars")
        return
    parts = {"process": plan.process_bytes, "vocabulary": plan.vocabulary_bytes}
    parts["recent texts"] = plan.texts_bytes
    parts |= {"weights": plan.weights_bytes, **plan.cache_bytes, "workspace": plan.workspace_bytes}
    print(", ".join(f"{part} {human_bytes(size)}" for part, size in parts.items() if size))
    draw = random.Random(1)
    words = range(min(plan.config.vocab_size, 30_000))
    with Engine.load(model, options) as engine:
        engine.warm_up()
        for _ in range(2):
            prompts = [draw.choices(words, k=max_context - NEW_TOKENS) for _ in range(sequences)]
            requests = [
                GenerationRequest(prompt_token_ids=prompt, max_tokens=NEW_TOKENS, temperature=0)
                for prompt in prompts
            ]
            for generation in [engine.submit(request) for request in requests]:
                generation.result()
    peak = peak_resident_bytes() or 0
    print(f"planned {human_bytes(plan.total_bytes)}, measured {human_bytes(peak)}", end="")
    print(f": {peak / plan.total_bytes - 1:+.1%}")


def _resident_bytes() -> int:
    gc.collect()
    return_freed_memory()
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main(memory_plan, "memory_plan")
