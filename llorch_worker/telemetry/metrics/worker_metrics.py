"""The metrics of one worker: vLLM's, under our prefix, and our own.

What Prometheus asks for is read when it asks. Only a job's end is noted when it happens.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Final, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from llorch_worker.broker.jobs.ended_jobs import EndedJob
from llorch_worker.contract.errors import ERROR_CLASSES
from llorch_worker.contract.result import FinishReason
from llorch_worker.engine.interface import (
    STEP_TOKENS,
    TOKEN_GAP_S,
    DeathLabel,
    EngineStats,
    StepFigures,
    Tally,
)
from llorch_worker.telemetry.metrics.buckets import FIRST_TOKEN_S, REQUEST_S
from llorch_worker.telemetry.metrics.families import counter, gauge

LABELS: Final = ("model_name", "engine")
ENGINE: Final = "0"
"""vLLM numbers the engines of one process; ours differ by their model."""


@dataclass(frozen=True)
class SeatFigures:
    """What a worker knows of one of its engines at the moment when it is asked."""

    stats: EngineStats
    steps: StepFigures
    deaths: Mapping[tuple[str, str], int]
    """Of engines, by model and :data:`.DeathLabel`."""
    deliveries: Mapping[tuple[str, str], int]
    """By model: jobs that began to run (attempts, redeliveries, resumes)."""
    load_s: float
    is_there: bool
    """Whether it has an engine now."""
    loads: Mapping[tuple[str, str], int]
    """By model and why it was loaded."""


@dataclass(frozen=True)
class WorkerFigures:
    """What a worker knows of itself at the moment when it is asked."""

    seats: Sequence[SeatFigures]
    fenced_writes: int
    lease_age_s: float
    late_s: float
    """How much longer than it may a model waits for a worker, if all have jobs."""


Read = Callable[[SeatFigures], float]

_GAUGES: Final[dict[str, tuple[str, Read]]] = {
    "num_requests_running": (
        "Sequences in the running batch.",
        lambda seat: seat.stats.running,
    ),
    "num_requests_waiting": (
        "Sequences that wait in the engine for a slot or for KV blocks.",
        lambda seat: seat.stats.waiting,
    ),
    "kv_cache_usage_perc": (
        "Share of the KV blocks that sequences hold; 1 means all.",
        # A server tells of none.
        lambda seat: (
            (seat.stats.kv_blocks_total - seat.stats.kv_blocks_free)
            / max(1, seat.stats.kv_blocks_total)
        ),
    ),
    "model_load_seconds": (
        "Seconds that loading and warming up the model took.",
        lambda seat: seat.load_s,
    ),
}
_COUNTERS: Final[dict[str, tuple[str, Read]]] = {
    "prefix_cache_queries": (
        "Tokens of prompts that were looked for in the KV cache.",
        lambda seat: seat.steps.looked_up_tokens,
    ),
    "prefix_cache_hits": (
        "Tokens of prompts that were found in the KV cache.",
        lambda seat: seat.steps.found_tokens,
    ),
    "prompt_tokens": (
        "Tokens of prompts that were prefilled, found ones included.",
        lambda seat: seat.steps.prompt_tokens,
    ),
    "generation_tokens": (
        "Generated tokens.",
        lambda seat: seat.steps.generated_tokens,
    ),
    "spec_decode_num_drafts": (
        "Guesses of one or more next tokens that a step checked.",
        lambda seat: seat.stats.drafts_total,
    ),
    "spec_decode_num_draft_tokens": (
        "Tokens of these guesses.",
        lambda seat: seat.stats.draft_tokens_total,
    ),
    "spec_decode_num_accepted_tokens": (
        "Tokens of these guesses that became tokens of a text.",
        lambda seat: seat.stats.accepted_draft_tokens_total,
    ),
    "num_preemptions": (
        "Sequences that gave up their KV blocks to others.",
        lambda seat: seat.stats.preempted_total,
    ),
    "engine_steps": (
        "Steps of the engine.",
        lambda seat: seat.steps.step_tokens.count,
    ),
}


_DELIVERIES: Final = {
    "attempts": "Jobs that the worker began to run.",
    "redeliveries": "Of these, jobs that had been claimed before.",
    "resumes": "Of these, jobs that went on after tokens of an earlier attempt.",
}


class WorkerMetrics:
    """The registry that a worker serves, and the observer of its jobs' ends."""

    def __init__(self, models: Sequence[str], read: Callable[[], WorkerFigures]) -> None:
        """``models``: all that the worker serves."""
        # Otherwise each counter has a second series with the time of its creation.
        disable_created_metrics()
        self._models = models
        self.registry = registry = CollectorRegistry()
        registry.register(_Live(models, read))
        ProcessCollector(registry=registry)
        self._ended = self._counter("jobs_ended", "Jobs that ended here.", "outcome")
        self._errors = self._counter("job_errors", "Jobs that failed, by their error.", "code")
        self._success = self._counter(
            "request_success", "Jobs that ended with a result.", "finished_reason"
        )
        # From 0 on: the rate of a series that begins with 1 does not show that first job.
        for model in models:
            for reason in get_args(FinishReason):
                self._success.labels(model, ENGINE, reason)
            for outcome in (*get_args(FinishReason), "failed"):
                self._ended.labels(model, ENGINE, outcome)
            for code in ERROR_CLASSES:
                self._errors.labels(model, ENGINE, code)
        self._first_token = self._histogram(
            "time_to_first_token", "From the enqueueing to the first token.", FIRST_TOKEN_S
        )
        self._whole = self._histogram("e2e_request_latency", "From the enqueueing to the end.")
        self._queue = self._histogram(
            "request_queue_time", "From the enqueueing to the first step."
        )
        self._prefill = self._histogram(
            "request_prefill_time", "From the first step to the first token."
        )
        self._decode = self._histogram("request_decode_time", "From the first token to the end.")

    def job_ended(self, job: EndedJob) -> None:
        """Counts a job's end. The histograms hold successes only, as vLLM's do; of a resumed job,
        whose first token is of another attempt, only how long it took in all."""
        labels = (job.model, ENGINE)
        self._ended.labels(*labels, job.outcome).inc()
        if job.error is not None:
            self._errors.labels(*labels, job.error).inc()
        timings = job.timings
        if timings is None:
            return
        self._success.labels(*labels, job.outcome).inc()
        self._whole.labels(*labels).observe((timings.first_token_ms + timings.decode_ms) / 1e3)
        if job.resumed:
            return
        for histogram, duration_ms in (
            (self._first_token, timings.first_token_ms),
            (self._queue, timings.queue_ms),
            (self._prefill, timings.prefill_ms),
            (self._decode, timings.decode_ms),
        ):
            histogram.labels(*labels).observe(duration_ms / 1e3)

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(f"llorch_{name}", help, (*LABELS, label), registry=self.registry)

    def _histogram(self, name: str, help: str, bounds: tuple[float, ...] = REQUEST_S) -> Histogram:
        histogram = Histogram(
            f"llorch_{name}_seconds", help, LABELS, registry=self.registry, buckets=bounds
        )
        for model in self._models:
            histogram.labels(model, ENGINE)
        return histogram


class _Live(Collector):
    """What is read at each scrape."""

    def __init__(self, models: Sequence[str], read: Callable[[], WorkerFigures]) -> None:
        self._models = models
        self._read = read

    def collect(self) -> Iterable[Metric]:
        worker = self._read()
        seats = [((seat.stats.model, ENGINE), seat) for seat in worker.seats]
        yield from self._residency(worker)
        for name, (help, read) in _GAUGES.items():
            yield gauge(name, help, LABELS, [(labels, read(seat)) for labels, seat in seats])
        for name, (help, read) in _COUNTERS.items():
            yield counter(name, help, LABELS, [(labels, read(seat)) for labels, seat in seats])
        began = self._of_models((seat.deliveries for seat in worker.seats), _DELIVERIES)
        for what, help in _DELIVERIES.items():
            counts = [((model, ENGINE), began[model, what]) for model in self._models]
            yield counter(f"job_{what}", help, LABELS, counts)
        whole = self._models[0], ENGINE  # what concerns the whole worker stands at its first model
        help = "Seconds since the worker last renewed its leases."
        yield gauge("lease_age_seconds", help, LABELS, [(whole, worker.lease_age_s)])
        help = "Writes of tokens or results that Redis refused because the claim was lost."
        yield counter("fenced_writes", help, LABELS, [(whole, worker.fenced_writes)])
        died = self._of_models((seat.deaths for seat in worker.seats), get_args(DeathLabel))
        yield counter(
            "engine_deaths",
            "Engines that died or did not start again.",
            (*LABELS, "reason"),
            [((model, ENGINE, reason), count) for (model, reason), count in died.items()],
        )
        yield gauge(
            "memory_bytes",
            "Bytes that the engine holds.",
            (*LABELS, "part"),
            [
                ((*labels, part), size_bytes)
                for labels, seat in seats
                for part, size_bytes in seat.stats.bytes.items()
            ],
        )
        for name, help, kind, bounds in (
            (
                "inter_token_latency_seconds",
                "From a token to the next one.",
                "token_gaps",
                TOKEN_GAP_S,
            ),
            (
                "iteration_tokens_total",
                "Tokens that a step computes.",
                "step_tokens",
                STEP_TOKENS,
            ),
        ):
            histogram = HistogramMetricFamily(f"llorch_{name}", help, labels=LABELS)
            for labels, seat in seats:
                tally = getattr(seat.steps, kind)
                histogram.add_metric(labels, buckets(tally, bounds), tally.sum)
            yield histogram

    def _of_models(
        self, counts: Iterable[Mapping[tuple[str, str], int]], kinds: Iterable[str]
    ) -> Counts[tuple[str, str]]:
        """Counts of these kinds by model, of all seats: a seat's model may change. From 0 on:
        Prometheus sees no increase in a first value."""
        found: Counts[tuple[str, str]] = Counts(dict.fromkeys(product(self._models, kinds), 0))
        for of_seat in counts:
            found.update(dict(of_seat))
        return found

    def _residency(self, worker: WorkerFigures) -> Iterable[Metric]:
        seats = worker.seats
        kept = {seat.stats.model for seat in seats if seat.is_there}
        help = (
            "How much longer than LLORCH_MAX_WAIT_S a model waits for a worker, if all have jobs."
        )
        late = (self._models[0], ENGINE), worker.late_s
        yield gauge("models_late_seconds", help, LABELS, [late])
        help = "1 for the models that the worker keeps loaded."
        loaded = [((model, ENGINE), float(model in kept)) for model in self._models]
        yield gauge("resident", help, LABELS, loaded)
        counts: Counts[tuple[str, str]] = Counts()
        for seat in seats:
            counts.update(seat.loads)
        yield counter(
            "model_loads",
            "Loads of a model, by their reason.",
            (*LABELS, "reason"),
            [((model, ENGINE, reason), count) for (model, reason), count in counts.items()],
        )


def buckets(tally: Tally, bounds: Iterable[float]) -> list[tuple[str, int]]:
    """Each bound as Prometheus writes it, with the number of values up to it."""
    names = map(floatToGoString, (*bounds, float("inf")))
    return list(zip(names, accumulate(tally.counts), strict=True))
