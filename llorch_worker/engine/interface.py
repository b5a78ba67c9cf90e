"""What others use of an engine, in their own process or in another. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypedDict, Unpack

from llorch_worker.contract import (
    TASK_NAME,
    Event,
    GenerationRequest,
    InternalError,
    Journal,
)
from llorch_worker.engine.handle import GenerationHandle
from llorch_worker.engine.told import TokensTold
from llorch_worker.intake.prepared import Limits
from llorch_worker.processes.child import EndLabel


@dataclass(frozen=True)
class ModelFacts:
    """What is fixed from an engine's load to its end."""

    model_name: str
    fingerprint: str = ""
    """See :func:`.fingerprint`."""
    arithmetic: str = ""
    """Dtypes and kernels."""
    max_context: int = 0
    max_sequences: int = 0
    vocab_size: int = 0
    """The number of logits."""
    pool_tokens: int = 0
    """The capacity of all KV blocks."""
    drafts: bool = False
    """Whether predictions are of use."""
    drafter: str = "off"
    """What drafts tokens."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """What senders of jobs may take; the engine does nothing with it."""
    device: str = "cpu"
    """The device of model and cache, as torch names it."""
    card_uuids: tuple[str, ...] = ()
    """Those of the cards that torch sees, without ``GPU-``; empty on another device."""
    replays: bool = True
    """Whether a job goes on after any journal of this model."""
    weakens: tuple[str, ...] = ()
    """Which promises a server does not keep, in a few words each."""
    tasks: tuple[str, ...] = (TASK_NAME,)
    """The tasks that it runs."""
    width: int = 0
    """Numbers of a vector; 0 if it makes none."""
    sizes: tuple[int, ...] = ()
    """To how many numbers a vector may be cut, beside all; empty: to any."""
    scores_pairs: bool = False
    """Whether a head scores pairs of texts."""
    longest_text: int = 0
    """Most tokens of a text that is only read, if fewer than ``max_context``; else 0."""
    asks_as_qwen3: bool = False
    """Whether texts are put to it in the words of Qwen3-Embedding and Qwen3-Reranker."""

    @property
    def does_both(self) -> bool:
        """Whether it generates, and reads texts for vectors."""
        return TASK_NAME in self.tasks and len(self.tasks) > 1

    @property
    def limits(self) -> Limits:
        """What an intake needs to know of the model."""
        return Limits(
            self.vocab_size,
            self.max_context,
            self.pool_tokens,
            self.drafts,
            self.width,
            self.scores_pairs,
            self.asks_as_qwen3,
            self.longest_text,
            self.sizes,
        )


DeathLabel = Literal[EndLabel, "load", "server"]
"""Why an engine died, for metrics. ``load``: it did not start. ``server``: the engine is a server,
which is away."""


@dataclass(frozen=True)
class Death:
    """How an engine's process ended without being asked to."""

    label: DeathLabel
    reason: str
    """In a few words that hold no text of a job, such as ``signal SIGSEGV``."""
    suspects: tuple[str, ...] = ()
    """The ids of the jobs in its hands: in a step on the device, or being taken in."""
    exit_code: int | None = None
    """As of ``Popen``: negative for a signal; None if it could not be told."""
    lives: bool = False
    """Whether it ended the one suspect alone, and runs others."""


class EngineDied(InternalError):
    """The engine that ran the job has died; another one may run it."""

    def __init__(self, death: Death) -> None:
        self.death = death
        super().__init__(f"the engine died: {death.reason}")


class Attempt(TypedDict, total=False):
    """What :meth:`EngineInterface.submit` takes beside the request."""

    job_id: str | None
    """Drawn if there is none."""
    worker: str
    attempt: int
    queued_at: float | None
    """Unix time in s at which the job was enqueued; ``deadline_s``, ``queue_ms`` and
    ``first_token_ms`` count from it, or from now."""
    retried_at: float | None
    """Unix time in s at which an ended job was enqueued once more; ``queue_ms`` and
    ``first_token_ms`` count from it."""
    journal: Journal | None
    """The events of earlier attempts from the job's stream. The generation continues there: tokens,
    text, logprobs and usage are those of an uninterrupted run, events contain only new output, and
    complete choices do not run again. ``usage.cached`` and the other timings are those of this
    attempt."""
    suspect: bool
    """The job may have ended an engine. Until its first token it computes in steps of its own."""
    on_event: Callable[[Event], None] | None
    """Called on the engine's thread with every event; must not block, because every job waits for
    it. If it raises, this generation is cancelled."""
    on_tokens: Callable[[TokensTold], None] | None
    """Called with new tokens in place of ``on_event``, without what it takes to make an event of
    each; must not block or raise."""
    handle: int
    """What the board of an engine in the caller's process calls the generation."""


class EngineInterface(Protocol):
    """An engine, wherever it runs: ``Engine`` in the caller's process, ``EngineProcess`` in one of
    its own. Any thread may call any method."""

    @property
    def facts(self) -> ModelFacts: ...

    def warm_up(self) -> None:
        """Prepares for jobs; call it once, before the first."""

    def submit(self, request: GenerationRequest, **attempt: Unpack[Attempt]) -> GenerationHandle:
        """See :meth:`.Engine.submit`."""

    def logits(self, token_ids: Ids[int]) -> Any:
        """The logits after each of ``token_ids``: [tokens, vocab] float32, a tensor or a
        ``memoryview``."""

    def stats(self) -> EngineStats:
        """The engine's figures. Those of another process are the last that it has told, if it does
        not answer at once."""

    def step_figures(self) -> StepFigures:
        """What the steps did since the load; as fresh as :meth:`stats`."""

    def misplaced_tensors(self) -> tuple[str, ...]:
        """Tensors of model and cache that are not on the engine's device; empty unless something is
        broken. Raises ``TimeoutError`` if another process does not answer."""

    @property
    def healthy(self) -> bool:
        """Whether it takes requests; False after :meth:`close` or a death."""

    def stalled_for_s(self) -> float:
        """Seconds without a sign of life, for a watchdog; 0.0 while idle, and while the engine
        waits for a keeper that reads no events."""

    def close(self) -> None:
        """Cancels running generations and ends the engine; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine; totals count from its start.

    ``bytes``: memory held, by part: weights, kv, rope, masks. ``planned_bytes``: the plan by part,
    including the ``workspace`` of steps. ``measured_bytes``: what was measured, empty before
    :meth:`Engine.warm_up`; on a card with ``workspace``, the peak of the steps, and
    ``reserved``, what torch's allocator holds beyond that.

    ``tokens_per_s``: generated tokens of all sequences over the last 5 s. ``kv_blocks_kept``: free
    blocks whose contents later prompts may find. ``prefix_hits_total``: prefills that found their
    beginning. ``cached_tokens_total``: tokens that did not have to be computed, including those of
    preempted sequences and resumed jobs. ``drafts_total`` counts the guesses of one or more
    tokens that a step checked, ``draft_tokens_total`` their tokens, and
    ``accepted_draft_tokens_total`` those that became tokens of a text.
    """

    model: str
    device: str
    dtype: str
    bytes: dict[str, int]
    planned_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    max_context: int
    max_sequences: int
    running: int
    waiting: int
    tokens_per_s: float
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    kv_blocks_kept: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    prefix_hits_total: int = 0
    completion_tokens_total: int = 0
    finished_total: int = 0
    preempted_total: int = 0
    steps_total: int = 0
    drafts_total: int = 0
    draft_tokens_total: int = 0
    accepted_draft_tokens_total: int = 0


STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKEN_GAP_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""The upper bounds of buckets. They are vLLM's, so that its dashboards fit."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of values by bucket, of those up to its bound and above the one before; the last
    bucket has no bound."""

    counts: tuple[int, ...]
    sum: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class TallyCounts:
    """A histogram for an engine's thread, which has no time for locks. One thread adds, any thread
    reads; a reader may see the sum without the value that is just being added."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Ids[float]) -> None:
        """``bounds``: see :class:`.Tally`."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> Tally:
        return Tally(tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What the steps did since the load, or since :meth:`EngineInterface.warm_up`."""

    step_tokens: Tally = Tally((0,) * (len(STEP_TOKENS) + 1))
    """Tokens that each step computed, of prompts and of texts; by :data:`STEP_TOKENS`."""
    token_gaps: Tally = Tally((0,) * (len(TOKEN_GAP_S) + 1))
    """Seconds between a sequence's token and the one before it; by :data:`TOKEN_GAP_S`."""
    prompt_tokens: int = 0
    looked_up_tokens: int = 0
    """Tokens of prompts that were looked for in the KV cache: those of every choice."""
    found_tokens: int = 0
    generated_tokens: int = 0
