"""What a page shows of each kind of run: a table for each command of ``llorch bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from llorch_worker.bench.report.fields import at, number, rows, text, texts
from llorch_worker.bench.report.readings import Metric, Place, Reading
from llorch_worker.contract.quantities import counted

Document = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """How the documents of one command are read."""

    readings: Callable[[Document], Iterator[Reading]]
    load: Callable[[Document], str]
    subject: Callable[[Document], str]
    notes: Callable[[Document], Iterator[str]] = lambda document: iter(texts(document, "notes"))


def _model(document: Document) -> str:
    stem = PurePath(text(document, "model")).stem
    return f"{stem}, {text(document, 'dtype')}" if stem else ""


def _load(document: Document) -> str:
    prompt, new = text(document, "prompt_tokens"), text(document, "new_tokens")
    at_once = text(document, "concurrency")
    requests = f"{at_once} prompts of" if at_once else "prompts of"
    return f"{requests} {prompt} tokens, {new} new ones each"


_ENGINE = {
    "prefill_tokens_per_s": Metric("prefill", "tokens/s", "higher"),
    "decode_tokens_per_s": Metric("decode", "tokens/s", "higher"),
    "total_tokens_per_s": Metric("total", "tokens/s", "higher"),
    "first_token_ms.p50": Metric("first token, p50", "ms", "lower"),
    "first_token_ms.p99": Metric("first token, p99", "ms", "lower"),
    "between_tokens_ms.p50": Metric("between tokens, p50", "ms", "lower"),
    "between_tokens_ms.p99": Metric("between tokens, p99", "ms", "lower"),
    "decode_read_share": Metric("decode reads, of the machine's", "%", "higher"),
    "prefill_flops_share": Metric("prefill computes, of the machine's", "%", "higher"),
    "outside_model_share": Metric("decode step outside the model", "%", "lower"),
}


def _engine(document: Document) -> Iterator[Reading]:
    prompt_tokens = number(document, "prompt_tokens") or 0
    for row in rows(document, "rows"):
        place = Place("prompt tokens", prompt_tokens, _sequences(row))
        yield from _of_row(row, _sequences(row), _ENGINE, place)


def _engine_notes(document: Document) -> Iterator[str]:
    for row in rows(document, "rows"):
        for note in (*filter(None, [text(row, "reason")]), *texts(row, "notes")):
            yield f"{_sequences(row)}: {note}"


def _sequences(row: Document, path: str = "concurrency") -> str:
    return counted(int(number(row, path) or 0), "sequence")


_OVERHEAD = {
    "outside_model_mean_ms": Metric("a decode step outside the model, mean", "ms", "lower"),
    "outside_model_ms.p50": Metric("a decode step outside the model, p50", "ms", "lower"),
    "share": Metric("share of the step", "%", "lower"),
}


def _overhead(document: Document) -> Iterator[Reading]:
    for row in rows(document, "rows"):
        vocabulary = f"{number(row, 'vocab_size') or 0:,.0f} tokens"
        category = ", ".join((text(row, "model"), vocabulary, text(row, "sampling")))
        yield from _of_row(row, category, _OVERHEAD)


def _profile(document: Document) -> Iterator[Reading]:
    for phase in rows(document, "phases"):
        name = text(phase, "phase")
        metrics = {
            "share": Metric(f"{name}: share of the step", "%"),
            "ms_per_step": Metric(f"{name}: time a step", "ms", "lower"),
        }
        for part in rows(phase, "components"):
            yield from _of_row(part, text(part, "component"), metrics)


_QUEUE = {
    "tokens_per_s": Metric("tokens", "tokens/s", "higher"),
    "jobs_per_s": Metric("jobs", "jobs/s", "higher"),
}
_QUEUE_LOAD = {
    "share": Metric("of the engine's tokens, those that arrive through Redis", "%", "higher"),
    "delivery_ms.p50": Metric("delivery of a job, p50", "ms", "lower"),
    "delivery_ms.p95": Metric("delivery of a job, p95", "ms", "lower"),
}
_QUEUE_SINGLE = {
    "added_p50_ms": Metric("added to a job on its own, p50", "ms", "lower"),
    "added_p95_ms": Metric("added to a job on its own, p95", "ms", "lower"),
}
_NO_OP = {
    "run_per_s": Metric("jobs that do nothing, run", "jobs/s", "higher"),
    "sent_per_s": Metric("jobs that do nothing, sent", "jobs/s", "higher"),
}
_NO_OP_ALONE = {
    "p50": Metric("a job that does nothing, alone, p50", "ms", "lower"),
    "p95": Metric("a job that does nothing, alone, p95", "ms", "lower"),
}


def _queue(document: Document) -> Iterator[Reading]:
    for row in rows(document, "rows"):
        jobs = number(row, "jobs") or 0
        for path, name in (("straight", "straight"), ("queued", "through Redis")):
            place = Place("jobs", jobs, name)
            yield from _of_row(at(row, path), f"{counted(int(jobs), 'job')}, {name}", _QUEUE, place)
        place = Place("jobs", jobs, "")
        yield from _of_row(row, counted(int(jobs), "job"), _QUEUE_LOAD, place)
    yield from _of_row(at(document, "single"), "one at a time", _QUEUE_SINGLE)
    for path, name in (("ours", "llorch"), ("stock", "stock Celery")):
        yield from _of_row(at(document, f"no_op.{path}"), name, _NO_OP)
        yield from _of_row(at(document, f"no_op.{path}_alone_ms"), name, _NO_OP_ALONE)


def _queue_load(document: Document) -> str:
    parts = [f"{text(document, 'concurrency')} at once"]
    if not rows(document, "rows"):
        return f"{parts[0]}, doing nothing"
    for path, what in (("prompt_tokens", "prompt tokens"), ("new_tokens", "new tokens")):
        span = at(document, path)
        if isinstance(span, list):
            parts.append(f"{' to '.join(map(str, span))} {what}")
    return ", ".join(parts)


_QUEUED = {"tokens_per_s": Metric("tokens with jobs waiting", "tokens/s", "higher")}
_CONTEXTS = {
    "prefill_tokens_per_s": Metric("prefill", "tokens/s", "higher"),
    "decode_tokens_per_s": Metric("decode", "tokens/s", "higher"),
}


def _scaling(document: Document) -> Iterator[Reading]:
    for row in rows(document, "queued"):
        queued = number(row, "queued") or 0
        place = Place("jobs waiting at the start", queued, "")
        yield from _of_row(row, counted(int(queued), "job"), _QUEUED, place)
    for row in rows(document, "contexts"):
        tokens = number(row, "context_tokens") or 0
        place = Place("tokens of context", tokens, "")
        yield from _of_row(row, f"{tokens:,.0f} tokens of context", _CONTEXTS, place)


_STARTUP = {
    "ready.median_s": Metric("load and first token", "s", "lower"),
    "read.median_s": Metric("read the file, one thread", "s", "lower"),
    "write.median_s": Metric("write once what the model holds", "s", "lower"),
    "ratio": Metric("ready, against read and write together", "times", "lower"),
}


def _startup(document: Document) -> Iterator[Reading]:
    yield from _of_row(document, _model(document), _STARTUP)


def _startup_load(document: Document) -> str:
    context = number(document, "max_context") or 0
    return f"{_sequences(document, 'max_sequences')} of up to {context:,.0f} tokens"


_PEERS_RATES = {
    "prefill": Metric("prefill", "tokens/s", "higher"),
    "decode": Metric("decode", "tokens/s", "higher"),
    "jobs": Metric("mixed jobs", "tokens/s", "higher"),
}
_PEERS_RATIO = Metric("llorch against the peer, by turns", "times", "higher")


def _peers(document: Document) -> Iterator[Reading]:
    for row in rows(document, "rows"):
        metric = _PEERS_RATES.get(text(row, "kind"))
        if metric is None:
            continue
        peer, size = text(row, "peer"), _peers_size(row)
        ratio, ours = number(row, "ratio"), number(row, "ours.tokens_per_s")
        theirs = number(row, "theirs.tokens_per_s")
        if ratio is not None:
            yield Reading(_PEERS_RATIO, f"{peer}, {metric.title} of {size}", ratio)
        if ours is not None:
            yield Reading(metric, f"{size}, llorch beside {peer}", ours)
        if theirs is not None:
            yield Reading(metric, f"{size}, {peer}", theirs)


def _peers_size(row: Document) -> str:
    if text(row, "kind") == "prefill":
        return f"{text(row, 'prompt_tokens')} tokens"
    jobs = number(row, "jobs")
    return _sequences(row, "sequences") if jobs is None else counted(int(jobs), "job")


def _peers_notes(document: Document) -> Iterator[str]:
    notes = at(document, "notes")
    for peer, note in (notes if isinstance(notes, dict) else {}).items():
        yield f"{peer}: {note}"
    for row in rows(document, "rows"):
        if reason := text(row, "reason"):
            yield f"skipped {text(row, 'peer')}, {text(row, 'what')}: {reason}"


def _of_row(
    row: Any, category: str, metrics: dict[str, Metric], place: Place | None = None
) -> Iterator[Reading]:
    for path, metric in metrics.items():
        value = number(row, path)
        if value is not None:
            scaled = value * (100 if metric.unit == "%" else 1)
            yield Reading(metric, category, scaled, place)


KINDS = {
    "engine": Kind(
        readings=_engine,
        load=_load,
        subject=_model,
        notes=_engine_notes,
    ),
    "overhead": Kind(
        readings=_overhead,
        load=lambda document: _sequences(document, "sequences"),
        subject=lambda _: "",
    ),
    "profile": Kind(readings=_profile, load=_load, subject=_model),
    "queue": Kind(readings=_queue, load=_queue_load, subject=_model),
    "scaling": Kind(readings=_scaling, load=_load, subject=_model),
    "startup": Kind(readings=_startup, load=_startup_load, subject=_model),
    "peers": Kind(readings=_peers, load=_load, subject=_model, notes=_peers_notes),
}
"""By the command that made the document: ``llorch bench <kind>``."""
