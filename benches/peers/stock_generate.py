"""A stock Celery application with transformers' ``generate``, as a user would first write it."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from celery import Celery, signals

GENERATE_TASK = "stock.generate"
REDIS_VARIABLE = "LLORCH_REDIS_URL"
TERMS_VARIABLE = "LLORCH_BENCH_STOCK"
"""The model's path and dtype, as a JSON list."""


def stock_app(redis_url: str) -> Celery:
    """The app, with Celery's default settings."""
    app = Celery("stock", broker=redis_url, backend=redis_url, set_as_current=False)
    app.task(generate, name=GENERATE_TASK)
    return app


def generate(prompt: list[int], new_tokens: int) -> int:
    """Runs one job to its end; returns the number of generated tokens."""
    import torch

    ids = torch.tensor([prompt])
    generated = _model().generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens
    )
    return int(generated.shape[1]) - len(prompt)


@cache
def _model() -> Any:
    import torch

    from benches.peers.contestants.contestant import Terms
    from benches.peers.contestants.generate import load_model

    path, dtype = json.loads(os.environ[TERMS_VARIABLE])
    terms = Terms(Path(path), dtype, torch.get_num_threads(), 1, 0, 0)
    return load_model(terms)


@signals.worker_init.connect  # type: ignore[untyped-decorator]
def _load(**_: object) -> None:
    _model()


app = stock_app(os.environ.get(REDIS_VARIABLE, "redis://localhost:6379/0"))
