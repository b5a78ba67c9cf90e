"""What a stock producer asks of any server."""

from __future__ import annotations

from celery import Celery, chain, chord, group

TOKENS = 5
PATIENCE_S = 150


def run_canvas(app: Celery, model: str, jobs: int) -> None:
    """A group of ``jobs``, and a chord of chains, whose greedy texts are all the same."""
    kwargs = {"prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0}
    each = app.signature("llorch.generate", kwargs=kwargs, queue=f"llorch.{model}")
    results = group(each.clone() for _ in range(jobs))().get(timeout=PATIENCE_S)
    assert len(results) == jobs
    assert len({result["text"] for result in results}) == 1
    assert {result["usage"]["completion"] for result in results} == {TOKENS}
    step = each.clone()
    step.set_immutable(True)
    end = chord([chain(step, step.clone()), chain(step, step.clone())], step).apply_async()
    assert end.get(timeout=PATIENCE_S)["text"] == results[0]["text"]
    assert len(end.parent.results) == 2
