"""A deterministic engine without a model, for tests of the code around the engine. A worker runs it
in a process of its own, as any engine.

Each step gives every running generation one token: token ``i`` has the text ``w<i> `` and the id
:func:`token_id`. ``TOY_FINGERPRINT`` is another model, whose texts have that for the ``w``; in the
file that ``TOY_FINGERPRINT_FILE`` names it may change between loads. A step lasts ``TOY_STEP_MS``,
loading lasts ``TOY_LOAD_S``, and 300 s once the file exists that ``TOY_LOADS_SLOWLY_FROM`` names.
The models that the file ``TOY_REFUSES`` names do not load. ``TOY_GENERATION_CONFIG`` is what the
model's files say about sampling, as JSON. While the file that ``TOY_MISPLACED`` names exists, the
engine reports a misplaced tensor.

Some prompts cause faults:

- ``raise <name>`` raises that builtin exception in ``submit``, with the prompt as its message.
- ``die`` ends the engine's process; ``die at <n>`` does so after n tokens.
- ``signal <name>`` has that signal end it, such as ``SIGSEGV``.
- ``eat`` takes memory until the kernel ends the process.
- ``break`` breaks the engine's thread; ``break once`` only in the job's first attempt; ``break
  after`` when the job has ended.
- ``hang`` blocks the engine for ever in the job's first attempt, ``hang always`` in each.
- ``wait <n> <path>`` stops the job after n tokens until that file exists, and leaves
  ``<path>.ended-<id>`` when the job ends. See :class:`tests.latch.Latch`.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from llorch_worker.contract import (
    ContextLengthExceeded,
    Event,
    Fault,
    GenerationRequest,
    Journal,
    ModelLoadFailed,
)
from llorch_worker.engine.interface import EngineStats, ModelFacts, StepFigures
from llorch_worker.engine.told import TokensTold
from llorch_worker.engine_options import EngineOptions
from llorch_worker.processes.board import Board
from tests.toy_generation import ToyGeneration

STEP_MS_VARIABLE = "TOY_STEP_MS"


class ToyEngine:
    """See the module's docstring."""

    def __init__(
        self,
        model_name: str,
        max_sequences: int,
        max_context: int,
        device: str,
        board: Board,
        outlet: Any,
    ) -> None:
        self.model_name = model_name
        file = os.environ.get("TOY_FINGERPRINT_FILE")
        self.fingerprint = (
            Path(file).read_text() if file else os.environ.get("TOY_FINGERPRINT", "w")
        )
        self.arithmetic = os.environ.get("TOY_ARITHMETIC", "none")
        self.device = device
        self.generation_config = json.loads(os.environ.get("TOY_GENERATION_CONFIG", "{}"))
        self.max_sequences = max_sequences
        self.drafter = "off"
        self.max_context = max_context
        self._board = board
        self._outlet = outlet
        self._step_s = float(os.environ.get(STEP_MS_VARIABLE, "1")) / 1e3
        self._running: list[ToyGeneration] = []
        self._changed = threading.Condition()
        self._closing = self._broken = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        path: str | Path,
        options: EngineOptions,
        *,
        model_name: str = "toy",
        board: Board,
        outlet: Any,
        progress: Callable[[int, int], None] | None = None,
        num_threads: int | None = None,
        **changed: Any,
    ) -> ToyEngine:
        options = replace(options, **changed)
        _fail_as_asked()
        refuses = Path(os.environ.get("TOY_REFUSES", "/nowhere/at/all"))
        if refuses.exists() and model_name in refuses.read_text().split():
            raise ModelLoadFailed(f"{model_name} is damaged")
        load_s = float(os.environ.get("TOY_LOAD_S", "0"))
        if Path(os.environ.get("TOY_LOADS_SLOWLY_FROM", "/nowhere/at/all")).exists():
            load_s = 300.0
        steps = max(1, int(load_s * 100))
        for step in range(steps):
            time.sleep(0.01)
            if progress is not None:
                progress(step + 1, steps)
        place = options.device if options.device.startswith("cuda") else "toy"
        context = options.max_context or 4096
        sequences = options.max_sequences or int(os.environ.get("TOY_ROOM", "16"))
        return cls(model_name, sequences, context, place, board, outlet)

    @property
    def facts(self) -> ModelFacts:
        cards = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return ModelFacts(
            model_name=self.model_name,
            fingerprint=self.fingerprint,
            arithmetic=self.arithmetic,
            max_context=self.max_context,
            max_sequences=self.max_sequences,
            generation_config=self.generation_config,
            device=self.device,
            card_uuids=tuple(card.removeprefix("GPU-") for card in cards if card),
        )

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
        on_tokens: Callable[[TokensTold], None] = lambda _: None,
        handle: int = 0,
    ) -> ToyGeneration:
        match (request.prompt or "").split():
            case ["raise", name, *_]:
                raise getattr(builtins, name)(request.prompt)
            case ["die"]:
                os._exit(9)
            case ["eat"]:
                meal = [bytearray(2**24) for _ in range(2**12)]
                raise MemoryError(len(meal))
            case ["signal", name]:
                os.kill(os.getpid(), signal.Signals[name])
                threading.Event().wait()  # a fault would go no further either
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
            self, id, request, emit, on_tokens, worker, attempt, retried_at or queued_at, known
        )
        generation.handle, generation.suspect = handle, suspect
        if journal:
            # Of the tokens that another model made, as a real engine would go on after them.
            generation.words = journal.choices[0].text.split()
            generation.arithmetic = (*journal.arithmetic, *generation.arithmetic)
        with self._changed:
            breaks = ["break", "break once"] if attempt == 1 else ["break"]
            self._broken |= (request.prompt or "") in breaks
            self._running.append(generation)
            self._changed.notify()
        return generation

    def stats(self) -> EngineStats:
        frozen = gc.get_freeze_count() if "TOY_COUNTS_FROZEN" in os.environ else 0
        return EngineStats(
            model=self.model_name,
            device=self.device,
            dtype="none",
            bytes={"weights": 0, "kv": 0, "rope": 0, "masks": 0},
            planned_bytes={},
            # Objects that the garbage collector ignores: counting takes long.
            measured_bytes={"frozen objects": frozen} if frozen else {},
            max_context=self.max_context,
            max_sequences=self.max_sequences,
            running=len(self._running),
            waiting=0,
            tokens_per_s=0.0,
            kv_blocks_total=1,
            kv_blocks_free=1,
            kv_blocks_kept=0,
            prompt_tokens_total=0,
            cached_tokens_total=0,
            prefix_hits_total=0,
            completion_tokens_total=0,
            finished_total=0,
            preempted_total=0,
            steps_total=0,
            drafts_total=0,
            draft_tokens_total=0,
            accepted_draft_tokens_total=0,
        )

    def misplaced_tensors(self) -> tuple[str, ...]:
        _fail_as_asked("check and ")
        path = os.environ.get("TOY_MISPLACED")
        return ("blocks.0.weight on cpu",) if path and Path(path).exists() else ()

    def warm_up(self) -> None:
        _fail_as_asked("warm up and ")

    def step_figures(self) -> StepFigures:
        return StepFigures()

    def fall_ill(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify()

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
            if not self._running:
                self._board.rest()
            self._changed.wait_for(lambda: self._running or self._closing or self._broken)
            if self._closing:
                return False
            suspects = [each for each in self._running if each.suspect and not each.words]
            batch = suspects[:1] or list(self._running)
        self._board.launch(each.handle for each in batch)
        if self._broken:
            self._outlet.broken(RuntimeError("the toy broke"))
        self._board.beat()
        time.sleep(self._step_s)
        done = [generation for generation in batch if not generation.step()]
        self._outlet.hurry()
        self._outlet.turned()
        with self._changed:
            self._running = [g for g in self._running if g not in done]
        return True


def _fail_as_asked(when: str = "") -> None:
    """``TOY_FAILS_FROM`` names a file: once it exists, it says how a load fails, ``die``, ``stop``
    or the message of a ``ModelLoadFailed``; ``warm up and stop`` and ``check and stop`` are
    later."""
    path = Path(os.environ.get("TOY_FAILS_FROM", "/nowhere/at/all"))
    said = path.read_text() if path.exists() else ""
    if said == f"{when}stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif said and not when and not said.endswith(" and stop"):
        if said == "die":
            os._exit(9)
        raise ModelLoadFailed(said)
