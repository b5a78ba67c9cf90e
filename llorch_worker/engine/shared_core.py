"""The steps of a model that generates and reads texts: those of two cores, by turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

from llorch_worker.contract import LlorchError
from llorch_worker.engine.core import EngineCore
from llorch_worker.engine.device.thread_count import ThreadCount
from llorch_worker.engine.generation import Generation
from llorch_worker.engine.texts_core import TextsCore
from llorch_worker.engine.texts_generation import TextsGeneration
from llorch_worker.engine.thread import StepDone

LEAST_STEPS: Final = 30
"""So many steps generate between two steps of texts, which then delay about one token of thirty:
the 95th percentile of the gaps between tokens is that of gaps without a step of texts."""


class SharedCore:
    """Gives each step to generation or to texts. The engine's thread alone calls it.

    A step of texts has at most as many tokens as any other, and no decode waits for two of them.
    Texts of a class above all that is generated get every second step: they delay a decode by one
    step, as a prefill of their class would. Others share: steps generate for as long as the last
    step of texts took, and :data:`LEAST_STEPS` times or for so many times as long, before the next
    one. Those of the class low wait until nothing of a higher class is generated, or as long as
    their class may have to.
    """

    def __init__(
        self,
        generating: EngineCore,
        texts: TextsCore,
        threads: ThreadCount | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``threads``: those of the steps that generate, of which decodes may take fewer."""
        self._generating = generating
        self._texts = texts
        self._threads = threads
        self._clock = clock
        self._texts_s = self._generated_s = 0.0
        """How long the last step of texts took, and since then the steps that generate."""
        self._steps = LEAST_STEPS
        """How many these were; at first enough."""

    @property
    def has_work(self) -> bool:
        return self._generating.has_work or self._texts.has_work

    @property
    def prefills_next(self) -> bool:
        return self._texts_are_next() or self._generating.prefills_next

    def add(self, job: Generation | TextsGeneration) -> None:
        if isinstance(job, TextsGeneration):
            self._texts.add(job)
        else:
            self._generating.add(job)

    def cancel(self, job: Generation | TextsGeneration) -> None:
        if isinstance(job, TextsGeneration):
            self._texts.cancel(job)
        else:
            self._generating.cancel(job)

    def cancel_all(self, reason: str) -> None:
        self._texts.cancel_all(reason)
        self._generating.cancel_all(reason)

    def fail_all(self, error: LlorchError) -> None:
        self._texts.fail_all(error)
        self._generating.fail_all(error)

    def check_integrity(self) -> None:
        self._generating.check_integrity()

    def step(self) -> StepDone:
        of_texts = self._texts_are_next()
        done = self._step(of_texts=of_texts)
        if not done.chunks and self.has_work:
            # Its last jobs have ended at their deadlines.
            done = self._step(of_texts=not of_texts)
        return done

    def _texts_are_next(self) -> bool:
        if not (self._generating.has_work and self._texts.has_work):
            return self._texts.has_work
        asked, generated = self._texts.first_class, self._generating.first_class
        if asked < generated:
            return self._steps > 0
        enough = self._steps >= LEAST_STEPS or self._generated_s > LEAST_STEPS * self._texts_s
        if not enough or self._generated_s < self._texts_s:
            return False
        return asked == generated or self._texts.is_urgent(self._clock())

    def _step(self, *, of_texts: bool) -> StepDone:
        begun_s = self._clock()
        if not of_texts:
            done: StepDone = self._generating.step()
            self._generated_s += self._clock() - begun_s
            self._steps += 1
            return done
        # What was launched ahead is of other jobs: who ends the device must be known.
        self._generating.settle()
        with nullcontext() if self._threads is None else self._threads.all_threads():
            done = self._texts.step()
        self._texts_s, self._generated_s, self._steps = self._clock() - begun_s, 0.0, 0
        return done
