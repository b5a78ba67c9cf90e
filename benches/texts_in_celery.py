"""What users of Celery write today: a task around transformers, as sentence-transformers computes.

``MODEL`` is a folder of sentence-transformers whose tokens are averaged. See :mod:`benches.texts`.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from celery import Celery
from transformers import AutoModel, AutoTokenizer

BATCH = 32
"""As sentence-transformers' own."""
LONGEST = 256

app = Celery("texts", broker=os.environ["BROKER"], backend=os.environ["BROKER"])


@cache
def _loaded() -> tuple[Any, Any]:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = os.environ["MODEL"]
    return AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()


@app.task(name="embed")  # type: ignore[untyped-decorator]
def embed(texts: list[str]) -> list[list[float]]:
    """The vectors of ``texts``, those of equal length computed together."""
    tokenizer, model = _loaded()
    order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
    vectors: list[list[float]] = [[] for _ in texts]
    for begin in range(0, len(texts), BATCH):
        places = order[begin : begin + BATCH]
        batch = tokenizer(
            [texts[at] for at in places],
            padding=True,
            truncation=True,
            max_length=LONGEST,
            return_tensors="pt",
        )
        with torch.inference_mode():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"][:, :, None]
        means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))
        for at, vector in zip(places, means.tolist(), strict=True):
            vectors[at] = vector
    return vectors
