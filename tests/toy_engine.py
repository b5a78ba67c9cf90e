"""A deterministic engine without a model, for tests of the code around the engine.

Each step gives every running generation one token: token ``i`` has the text ``w<i> `` and the id
:func:`token_id`. ``TOY_FINGERPRINT`` is another model, whose texts have that for the ``w``. A step
lasts ``TOY_STEP_MS``, loading lasts ``TOY_LOAD_S``. ``TOY_GENERATION_CONFIG`` is what the model's
files say about sampling, as JSON. While the file that
``TOY_MISPLACED`` names exists, the engine reports a misplaced tensor.

Some prompts cause faults:

- ``raise <name>`` raises that builtin exception in ``submit``, with the prompt as its message.
- ``die`` kills the process; ``die at <n>`` does so after n tokens.
- ``break`` breaks the engine; ``break once`` only in the job's first attempt; ``break after``
  when the job has ended.
- ``hang`` blocks the engine for ever in the job's first attempt.
- ``wait <n> <path>`` stops the job after n tokens until that file exists, and leaves
  ``<path>.ended-<id>`` when the job ends. See :class:`tests.latch.Latch`.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llorch_worker.contract import (
    ContextLengthExceeded,
    Event,
    Failed,
    Fault,
    GenerationRequest,
    InternalError,
    Journal,
)
from llorch_worker.demo_model import STORY_MODEL
from llorch_worker.engine.interface import StepFigures
from llorch_worker.engine_options import EngineOptions
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary
from tests.toy_generation import ToyGeneration

STEP_MS_VARIABLE = "TOY_STEP_MS"


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
    preempted_total: int
    drafts_total: int
    draft_tokens_total: int
    accepted_draft_tokens_total: int
    frozen_objects: int
    """Objects that the process's garbage collector ignores, if ``TOY_COUNTS_FROZEN`` is set:
    counting takes long."""


class ToyEngine:
    """See the module's docstring."""

    def __init__(
        self, model_name: str, max_sequences: int, max_context: int, device: str = "toy"
    ) -> None:
        self.model_name = model_name
        self.fingerprint = os.environ.get("TOY_FINGERPRINT", "w")
        self.arithmetic = os.environ.get("TOY_ARITHMETIC", "none")
        self.device = device
        self.generation_config = json.loads(os.environ.get("TOY_GENERATION_CONFIG", "{}"))
        self.max_sequences = max_sequences
        self.drafter = "off"
        self.max_context = max_context
        self.healthy = True
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
        options: EngineOptions,
        *,
        model_name: str = "toy",
        progress: Callable[[int, int], None] | None = None,
        **changed: Any,
    ) -> ToyEngine:
        options = replace(options, **changed)
        steps = max(1, int(float(os.environ.get("TOY_LOAD_S", "0")) * 100))
        for step in range(steps):
            time.sleep(0.01)
            if progress is not None:
                progress(step + 1, steps)
        place = options.device if options.device.startswith("cuda") else "toy"
        return cls(model_name, options.max_sequences, options.max_context or 4096, place)

    def submit(
        self,
        request: GenerationRequest,
        *,
        job_id: str | None = None,
        worker: str = "local",
        attempt: int = 1,
        queued_at: float | None = None,
        retried_at: float | None = None,
        journal: Journal | None = None,
        suspect: bool = False,
        on_event: Callable[[Event], None] | None = None,
    ) -> ToyGeneration:
        match (request.prompt or "").split():
            case ["raise", name, *_]:
                raise getattr(builtins, name)(request.prompt)
            case ["die"]:
                os._exit(9)
        emit = on_event or (lambda _: None)
        prompt = len((request.prompt or "").split())
        tokens = prompt + request.least_tokens
        if tokens > self.max_context:
            fault = Fault(field="prompt", rule=f"at most {self.max_context}", got=str(tokens))
            raise ContextLengthExceeded.from_faults([fault])
        room = self.max_context - prompt
        most = room if request.most_tokens is None else min(request.most_tokens, room)
        request = request.model_copy(update={"max_tokens": most})
        id = job_id or "local"
        known = len(journal.choices[0].token_ids) if journal else 0
        generation = ToyGeneration(
            self, id, request, emit, worker, attempt, retried_at or queued_at, known
        )
        if journal:
            # Of the tokens that another model made, as a real engine would go on after them.
            generation.words = journal.choices[0].text.split()
            generation.arithmetic = (*journal.arithmetic, *generation.arithmetic)
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

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The demo model's, for questions; the toy's own tokens are not among it."""
        return load_tokenizer(open_vocabulary(STORY_MODEL))

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
            preempted_total=0,
            drafts_total=0,
            draft_tokens_total=0,
            accepted_draft_tokens_total=0,
            frozen_objects=gc.get_freeze_count() if "TOY_COUNTS_FROZEN" in os.environ else 0,
        )

    def misplaced_tensors(self) -> tuple[str, ...]:
        path = os.environ.get("TOY_MISPLACED")
        return ("blocks.0.weight on cpu",) if path and Path(path).exists() else ()

    def warm_up(self) -> None: ...

    def step_figures(self) -> StepFigures:
        """Has no steps to tell of."""
        return StepFigures()

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
        while self._step():
            pass

    def _step(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._closing)
            if self._closing:
                return False
            batch = list(self._running)
        self._step_began_s = time.monotonic()
        time.sleep(self._step_s)
        done = [generation for generation in batch if not generation.step()]
        self._step_began_s = None
        with self._changed:
            self._running = [g for g in self._running if g not in done]
        return True
