"""A deterministic engine without a model, for tests of what lies around the engine.

Each step gives every running generation one token; token ``i`` has the id ``i`` and the text
``w<i> ``. ``TOY_STEP_MS`` is the length of a step, ``TOY_LOAD_S`` that of the load.

Some prompts ask for faults: ``raise <name>`` raises that builtin exception in ``submit``, with the
whole prompt as its message; ``die`` kills the process, ``die at <n>`` after n tokens; ``break``
breaks the engine under that job, ``break once`` in the job's first attempt, ``break after`` once
the job has ended; ``hang`` blocks the engine for ever in the job's first attempt. ``wait <n>
<path>`` stops the job after n tokens until that file is there, and leaves ``<path>.ended-<id>``
when it ends.
"""

from __future__ import annotations

import builtins
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llorch_worker.contract import (
    Cancelled,
    CancelledEvent,
    Choice,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    GenerationResult,
    InternalError,
    Journal,
    LlorchError,
    Started,
    Timings,
    Tokens,
    Usage,
)

STEP_MS_VARIABLE = "TOY_STEP_MS"
LOAD_S_VARIABLE = "TOY_LOAD_S"
MISPLACED_VARIABLE = "TOY_MISPLACED"
"""A file: while it is there, a tensor is not where it belongs."""


def token_id(seed: int | None, position: int) -> int:
    """The id that a request with ``seed`` gets at ``position``: no two seeds share one."""
    return ((seed or 0) << 16) + position


@dataclass(frozen=True)
class ToyStats:
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
    kv_blocks_total: int
    kv_blocks_free: int
    prompt_tokens_total: int
    cached_tokens_total: int
    steps_total: int


class ToyGeneration:
    def __init__(
        self,
        engine: ToyEngine,
        id: str,
        request: GenerationRequest,
        emit: Callable[[Event], None],
        worker: str,
        attempt: int,
        queued_at: float | None,
        known: int,
    ) -> None:
        self.id = id
        self.request = request
        self.worker = worker
        self.attempt = attempt
        self.emit = emit
        self.tokens = known
        words = (request.prompt or "").split(" ", 2)
        self.dies_at = int(words[2]) if words[:2] == ["die", "at"] else None
        self.waits = (int(words[1]), Path(words[2])) if words[:1] == ["wait"] else None
        self.started = False
        self.cancelled = False
        self.queue_ms = max(0.0, time.time() - queued_at) * 1e3 if queued_at else 0.0
        self._engine = engine
        self._done = threading.Event()
        self._end: GenerationResult | LlorchError | None = None

    def cancel(self) -> None:
        self.cancelled = True
        self._engine.wake()

    def result(self, timeout: float | None = None) -> GenerationResult:
        if not self._done.wait(timeout):
            raise TimeoutError(self.id)
        if isinstance(self._end, LlorchError):
            raise self._end
        assert self._end is not None
        return self._end

    def end(self, value: GenerationResult | LlorchError, event: Event) -> None:
        self.emit(event)
        self._end = value
        self._done.set()
        if self.waits:
            _, path = self.waits
            path.with_name(f"{path.name}.ended-{self.id}").touch()
        if self.request.prompt == "break after":
            threading.Timer(0.1, self._engine.fall_ill).start()

    def step(self) -> bool:
        """One token; whether the generation goes on."""
        if self.cancelled:
            self.end(Cancelled("cancelled"), CancelledEvent())
            return False
        prompt = self.request.prompt or ""
        if prompt == "hang" and self.attempt == 1:
            threading.Event().wait()
        if not self.started:
            self.started = True
            self.emit(
                Started(
                    worker=self.worker,
                    model=self._engine.model_name,
                    attempt=self.attempt,
                    prompt_tokens=len(prompt.split()),
                    queue_ms=self.queue_ms,
                )
            )
        if self.tokens == self.dies_at:
            os._exit(9)
        if self.waits and self.tokens >= self.waits[0] and not self.waits[1].exists():
            return True
        if self.tokens < self.request.max_tokens:
            self.emit(
                Tokens(
                    index=self.tokens,
                    ids=(token_id(self.request.seed, self.tokens),),
                    text=f"w{self.tokens} ",
                )
            )
            self.tokens += 1
        if self.tokens < self.request.max_tokens:
            return True
        timings = Timings(queue_ms=self.queue_ms, prefill_ms=0, first_token_ms=0, decode_ms=0)
        usage = Usage(prompt=1, completion=self.tokens)
        choice = Choice(
            index=0,
            text="".join(f"w{i} " for i in range(self.tokens)),
            token_ids=tuple(token_id(self.request.seed, i) for i in range(self.tokens)),
            finish_reason="length",
        )
        result = GenerationResult(
            id=self.id,
            model=self._engine.model_name,
            choices=(choice,),
            usage=usage,
            seed=self.request.seed or 0,
            timings=timings,
            worker=self.worker,
            attempts=self.attempt,
            metadata=self.request.metadata,
        )
        self.end(result, Finished(finish_reason="length", usage=usage, timings=timings))
        return False


class ToyEngine:
    """See the module's docstring."""

    def __init__(
        self, model_name: str, max_sequences: int, max_context: int, device: str = "toy"
    ) -> None:
        self.model_name = model_name
        self.device = device
        self.max_sequences = max_sequences
        self.max_context = max_context
        self.healthy = True
        self.steps_total = 0
        self._step_s = float(os.environ.get(STEP_MS_VARIABLE, "1")) / 1e3
        self._running: list[ToyGeneration] = []
        self._changed = threading.Condition()
        self._closing = False
        self._step_began_s: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "auto",
        max_sequences: int = 16,
        max_context: int | None = None,
        model_name: str = "toy",
        progress: Callable[[int, int], None] | None = None,
        **_: Any,
    ) -> ToyEngine:
        steps = max(1, int(float(os.environ.get(LOAD_S_VARIABLE, "0")) * 100))
        for step in range(steps):
            time.sleep(0.01)
            if progress is not None:
                progress(step + 1, steps)
        place = device if device.startswith("cuda") else "toy"
        return cls(model_name, max_sequences, max_context or 4096, place)

    def submit(
        self,
        request: GenerationRequest,
        *,
        job_id: str | None = None,
        worker: str = "local",
        attempt: int = 1,
        queued_at: float | None = None,
        journal: Journal | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> ToyGeneration:
        match (request.prompt or "").split():
            case ["raise", name, *_]:
                raise getattr(builtins, name)(request.prompt)
            case ["die"]:
                os._exit(9)
        emit = on_event or (lambda _: None)
        id = job_id or "local"
        known = len(journal.choices[0].token_ids) if journal else 0
        generation = ToyGeneration(self, id, request, emit, worker, attempt, queued_at, known)
        with self._changed:
            breaks = ["break", "break once"] if attempt == 1 else ["break"]
            if (request.prompt or "") in breaks:
                self.healthy = False
                error = InternalError("the toy broke")
                generation.end(error, Failed(error=error.document()))
                return generation
            self._running.append(generation)
            self._changed.notify()
        return generation

    def stalled_for_s(self) -> float:
        return 0.0 if self._step_began_s is None else time.monotonic() - self._step_began_s

    def stats(self) -> ToyStats:
        return ToyStats(
            model=self.model_name,
            device=self.device,
            dtype="none",
            bytes={"weights": 0, "kv": 0, "rope": 0, "masks": 0},
            planned_bytes={},
            measured_bytes={},
            max_context=self.max_context,
            max_sequences=self.max_sequences,
            running=len(self._running),
            waiting=0,
            tokens_per_s=0.0,
            kv_blocks_total=1,
            kv_blocks_free=1,
            prompt_tokens_total=0,
            cached_tokens_total=0,
            steps_total=self.steps_total,
        )

    def misplaced_tensors(self) -> tuple[str, ...]:
        path = os.environ.get(MISPLACED_VARIABLE)
        return ("blocks.0.weight on cpu",) if path and Path(path).exists() else ()

    def measure_memory(self) -> None: ...

    def fall_ill(self) -> None:
        self.healthy = False

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._closing)
                if self._closing:
                    return
                batch = list(self._running)
            self._step_began_s = time.monotonic()
            time.sleep(self._step_s)
            self.steps_total += 1
            done = [generation for generation in batch if not generation.step()]
            self._step_began_s = None
            with self._changed:
                self._running = [g for g in self._running if g not in done]
