"""Launches steps, each before the tokens of the one before it are read, where that can be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext

from llorch_worker.engine.device.thread_count import ThreadCount
from llorch_worker.engine.runner import Runner, Step
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.step_plan import StepPlan

logger = logging.getLogger(__name__)


class Launcher:
    """The steps on the device: the one whose tokens are due, and one ahead of it at most.

    On a device that works beside the host, a step is launched before the tokens of the previous
    one are read, if the scheduler can plan it without them. If a grammar has to see these tokens
    before it can say what may follow, only sampling waits for them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        threads: ThreadCount | None = None,
        *,
        launching: Callable[[Iterable[StepPlan]], None],
    ) -> None:
        """``launching`` is called with the steps that are not delivered, before the last of these
        starts."""
        self._launching = launching
        self._scheduler = scheduler
        self._runner = runner
        self._threads = threads
        self._ahead: Step | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether a step was launched ahead; it must be delivered next."""
        return self._ahead is not None

    @property
    def prefills_ahead(self) -> bool:
        """Whether the step that was launched ahead computes a part of a prompt."""
        return self._ahead is not None and bool(self._ahead.plan.prefills)

    def take_ahead(self) -> Step | None:
        """The step that was launched ahead, to deliver it."""
        step, self._ahead = self._ahead, None
        return step

    def launch(self, plan: StepPlan) -> Step:
        """Starts a step."""
        self._launching((plan,))
        return self._launch(plan, None)

    def launch_ahead(self, step: Step) -> StepPlan | None:
        """Starts the step after ``step``, if that is possible before ``step`` is read, and returns
        its plan."""
        if isinstance(step.pending, Exception) or not self._runner.overlaps:
            return None
        if (plan := self._scheduler.schedule_ahead(step.plan)) is not None:
            self._launching((step.plan, plan))
            self._ahead = self._launch(plan, step)
        return plan

    def sample(self, step: Step) -> None:
        """Starts sampling for ``step``, if that waited for the tokens before it."""
        try:
            self._runner.sample(step)
        except Exception as error:
            logger.debug("sampling could not be launched", exc_info=True)
            step.pending = error

    def drop_ahead(self) -> None:
        """Waits for the step after one that failed, and discards its tokens."""
        step = self.take_ahead()
        if step is None:
            return
        try:
            step.read()
        except Exception:
            logger.debug("the step after a failed step failed too", exc_info=True)
        self._scheduler.drop(step.plan)

    def note(self, plan: StepPlan, seconds: float) -> None:
        """A step without a prefill has taken so long, with sampling and delivery: these take time
        for each token too."""
        if (planner := self._scheduler.planner) is not None:
            planner.costs.note(plan.rows, seconds)
        if self._threads is not None:
            self._threads.note(plan.rows, seconds)

    def _launch(self, plan: StepPlan, after: Step | None) -> Step:
        threads = self._threads
        try:
            # A prefill has work for all.
            apart = nullcontext() if threads is None or not plan.prefills else threads.all_threads()
            with apart:
                return self._runner.launch(plan, after)
        except Exception as error:
            logger.debug("a step could not be launched", exc_info=True)
            return Step(plan, error)
