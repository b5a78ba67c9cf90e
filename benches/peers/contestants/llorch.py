"""This package's engine, including its work around the model."""

from __future__ import annotations

from contextlib import ExitStack

from benches.peers.contestants.contestant import Rate, Ready, Terms, Work
from llorch_worker.bench.instruments.loaded_engine import engine_for
from llorch_worker.bench.instruments.timed_load import Pass, run_pass
from llorch_worker.bench.load import Load
from llorch_worker.bench.plan import Plan
from llorch_worker.settings import Settings


class LlorchContestant:
    """Our engine. Its figures include sampling, detokenising and events."""

    def __init__(self, terms: Terms) -> None:
        settings = Settings(
            model=terms.model,
            device="cpu",
            dtype=terms.dtype,
            kv_dtype=terms.kv_dtype,
            max_step_tokens=max(terms.prefill_tokens, terms.most_sequences),
        )
        longest = Load.alike(terms.most_sequences, terms.context_tokens - 1, 1, seed=0)
        # Stays open until the process ends.
        self._open = ExitStack()
        plan = Plan(settings, threads=terms.threads)
        self._loaded = self._open.enter_context(engine_for(plan, longest))
        kv = "" if terms.kv_dtype == "auto" else f", KV in {terms.kv_dtype}"
        self.ready = Ready(versions={}, note=f"{terms.dtype}{kv}, sampling included")

    def warm_up(self, work: Work) -> None:
        self._pass(work, work.warm_up_tokens)

    def run(self, work: Work) -> Rate:
        done = self._pass(work, work.new_tokens)
        if work.kind == "prefill":
            return Rate(work.sequences * work.prompt_tokens / done.wall_s)
        phase = done.decode_phase()
        if phase is None:
            raise RuntimeError("in fewer than two steps all sequences decode; raise --new-tokens")
        return Rate(work.sequences / phase.step_s)

    def _pass(self, work: Work, new_tokens: int) -> Pass:
        # The same seed gives the same prompts.
        load = Load.alike(work.sequences, work.prompt_tokens, new_tokens, work.seed)
        return run_pass(self._loaded.engine, self._loaded.watched, load)
