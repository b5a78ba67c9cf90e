"""Loads the new weights that a model's files hold now, while the old ones serve if both fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, MutableMapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from celery.utils.log import get_logger

from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.contract import LlorchError
from llorch_worker.contract.quantities import counted
from llorch_worker.engine.process.engine_process import EngineProcess
from llorch_worker.model_files.hub import forget_commits
from llorch_worker.worker.leaving import let_leave
from llorch_worker.worker.resident_engine import reason_of

if TYPE_CHECKING:
    from llorch_worker.worker.engine_loader import EngineLoader
    from llorch_worker.worker.resident_engine import ResidentEngine

logger = get_logger(__name__)


class Reloader(Repeater):
    """A thread that reloads when it is asked to, one model after the other.

    A load that fails before the old engine has ended leaves that serving.
    """

    def __init__(
        self,
        engine: ResidentEngine,
        loaders: MutableMapping[str, EngineLoader],
        *,
        alone: threading.Lock,
        drain_s: float,
        hand_back: Callable[[Collection[str]], None],
        on_change: Callable[[], None],
    ) -> None:
        """``loaders``: of each model; that of new weights takes its place here. ``alone``: held
        while one of the worker's seats reloads, as each takes all memory that is free. ``drain_s``:
        how long jobs may end on the old weights; then ``hand_back`` returns them to their queue.
        ``on_change`` is called when :attr:`draining` or :attr:`state` has changed."""
        self._engine = engine
        self._loaders = loaders
        self._alone = alone
        self._drain_s = drain_s
        self._hand_back = hand_back
        self._on_change = on_change
        self._asked: SimpleQueue[str | None] = SimpleQueue()
        self.loading: dict[str, EngineLoader] = {}
        """What loads new weights now."""
        self.draining = False
        """Whether the worker takes no jobs, because the old engine has to end first."""
        self.state: str | None = None
        """What it does, or why the last reload did not, in one line; None after one that did."""
        super().__init__("reloader", "reload the model", self._wait)

    def ask(self, model: str | None) -> None:
        """Reloads ``model`` soon; None: what is loaded. A signal handler may call it."""
        self._asked.put(model or "")

    def close(self) -> None:
        self.closing.set()
        self._asked.put(None)
        super().close()

    def _wait(self) -> None:
        model = self._asked.get()
        if model is None or self.closing.is_set():
            return
        with self._alone, self._engine.moving:
            if self.closing.is_set():
                return
            name = self._engine.facts.model_name
            if model in ("", name):
                self._reload(name)
            else:
                self._forget(model)
                logger.info("%s is not loaded now; its next load reads its files anew", model)

    def _reload(self, model: str) -> None:
        old, loader = self._engine.current, self._loaders[model]
        if old is None:
            self._forget(model)
            logger.info("%s: it has no engine now; the next one reads its files", model)
            return
        if not isinstance(old, EngineProcess):
            logger.warning("%s is not reloaded: its server decides which weights it has", model)
            return
        self._say(f"looks at the new weights of {model}")
        new = loader.anew()
        taken = False
        try:
            forget_commits()
            taken = self._replace(model, old, new)
        except LlorchError as error:
            self._keep(model, reason_of(error))
        except Exception as error:
            logger.exception("the reload of %s failed", model)
            self._keep(model, f"a defect: {type(error).__name__}")
        finally:
            (loader if taken else new).close()

    def _forget(self, model: str) -> None:
        forget_commits()
        self._loaders[model].forget()

    def _replace(self, model: str, old: EngineProcess, new: EngineLoader) -> bool:
        """Whether ``new`` has taken the place of its loader."""
        when = self._judge(model, old, new)
        if when == "stay":
            return False
        if when == "beside":
            return self._load_beside(model, old, new)
        return self._load_after(model, new)

    def _judge(
        self, model: str, old: EngineProcess, new: EngineLoader
    ) -> Literal["stay", "beside", "after"]:
        """Whether the next engine is loaded beside the old one, after it, or not at all."""
        if not new.is_of_ours:
            return "beside"
        found = new.survey()
        if found.fingerprint == old.facts.fingerprint:
            self._done(f"{model} has these weights already")
            return "stay"
        if found.refusal is None:
            # On a card it would get the rest of the memory alone, for as long as it lives.
            return "after" if new.takes_what_is_free else "beside"
        if 0 < found.lacks_bytes <= sum(old.stats().bytes.values()):
            return "after"
        self._keep(model, found.refusal)
        return "stay"

    def _load_beside(self, model: str, old: EngineProcess, new: EngineLoader) -> bool:
        began_s = time.monotonic()
        self.loading = {model: new}
        try:
            self._say(f"loads new weights of {model}")
            engine = new.load()
        finally:
            self.loading = {}
        if engine.facts.fingerprint == old.facts.fingerprint:
            engine.close()
            self._done(f"{model} has these weights already")
            return False
        if not self._engine.take(engine, new.load, instead_of=old):
            engine.close()
            self._done(f"{model}: its old engine has ended meanwhile; the next one reads its files")
            return False
        self._loaders[model] = new
        self._engine.load_s = load_s = time.monotonic() - began_s
        jobs = counted(len(self._engine.jobs_of(old)), "job")
        self._done(f"{model} has new weights after {load_s:.1f} s; {jobs} of the old ones may end")
        self._empty(lambda: self._engine.jobs_of(old))
        self._engine.let_go()
        return True

    def _load_after(self, model: str, new: EngineLoader) -> bool:
        why = f"loads new weights of {model}"
        self.draining = True
        self._say(f"{why}, once its jobs have left")
        try:
            if not self._empty(lambda: _held(model)) or not self._engine.change(
                new.load, why, "reload"
            ):
                self._keep(model, "its jobs do not leave")
                return False
            self._loaders[model] = new
            if not self._engine.await_next(self.closing):
                return True
        finally:
            self.draining = False
            self._on_change()
        # Else the engine says why it does not start.
        if self._engine.absence is None:
            self._done(f"{model} has new weights")
        else:
            self.state = None
        return True

    def _empty(self, jobs: Callable[[], Collection[str]]) -> bool:
        return let_leave(jobs, self._drain_s, hand_back=self._hand_back, closing=self.closing)

    def _say(self, state: str) -> None:
        logger.info("%s", state)
        self.state = state
        self._on_change()

    def _done(self, sentence: str) -> None:
        logger.info("%s", sentence)
        self.state = None
        self._on_change()

    def _keep(self, model: str, reason: str) -> None:
        """Says why the old weights stay."""
        self.state = f"keeps the old weights of {model}: {reason}"
        logger.error("%s", self.state)
        self._on_change()


def _held(model: str) -> list[str]:
    """The jobs of a model that this worker has claimed and that have not ended."""
    return [claim.job_id for claim in HELD_CLAIMS.running(model)]
