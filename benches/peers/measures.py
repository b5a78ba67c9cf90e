"""Our engine and its peers on one file and one load. Peers run one at a time; passes alternate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeVar

import psutil

from benches.peers.contestants.contestant import (
    LLORCH,
    BatchKind,
    CannotRun,
    Memory,
    Rate,
    Terms,
    Work,
)
from benches.peers.contestants.process import ContestantProcess
from benches.peers.contestants.roster import (
    BATCH_PEERS,
    JOB_PEERS,
    STOCK_CELERY,
    interpreter_of,
    llama_server,
    require_installed,
    require_kv_dtype,
)
from benches.peers.conversions.converted import Conversions, weight_bits
from benches.peers.figures import BatchRow, JobsRow, PeersFigures, Side, Skipped
from benches.peers.services import JobService, LlamaServer, OurQueue, StockCelery
from llorch_worker.bench.instruments.alternating import alternate
from llorch_worker.bench.instruments.provenance import provenance
from llorch_worker.bench.instruments.timed_load import Load
from llorch_worker.bench.jobs.client_load import Throughput
from llorch_worker.bench.jobs.mixed_load import MixedLoad
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.engine.memory.load_plan import LoadPlan, plan_load
from llorch_worker.settings import Settings
from llorch_worker.weights.contents import file_bytes, tensor_types

Pass = TypeVar("Pass", Rate, Throughput)
STOCK_PASSES = 1
"""Jobs run one at a time take so long that one pass is enough."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    settings: Settings
    peers: tuple[str, ...]
    batches: tuple[int, ...]
    prefill_tokens: int
    prompt_tokens: int
    new_tokens: int
    jobs: MixedLoad
    slots: int
    passes: int
    threads: int
    llama_server: Path | None
    venvs: Path | None
    """A folder with the virtual environments of peers that have their own, named after them."""


def measure_peers(
    plan: Plan, now: Callable[[str], None], measured: Callable[[str], None]
) -> PeersFigures:
    """All rows; the row of a peer that cannot take part says why.

    ``now`` is told what is being measured, and ``measured`` what each pass gave. After an interrupt
    the figures have what there is; before the first row it is raised.

    Raises:
        CommandError: the model is not a GGUF file or has too short a context.
    """
    model = _checked(plan)
    bench = _Bench(plan, model, now, measured)
    interrupted = False
    try:
        bench.measure()
    except KeyboardInterrupt:
        if not bench.rows:
            raise
        interrupted = True
    return PeersFigures(
        provenance=provenance(
            device="cpu", seed=plan.jobs.seed, program=("python", "-m", "benches.peers")
        ),
        model=plan.settings.model,
        file_types=tuple(kind.name for kind in tensor_types(model.checkpoint)),
        dtype=model.dtype_name,
        kv_dtype=plan.settings.kv_dtype,
        threads=plan.threads,
        prefill_tokens=plan.prefill_tokens,
        prompt_tokens=plan.prompt_tokens,
        new_tokens=plan.new_tokens,
        passes=plan.passes,
        job_prompt_tokens=plan.jobs.prompt_tokens,
        job_new_tokens=plan.jobs.new_tokens,
        slots=plan.slots,
        versions=bench.versions,
        notes=bench.notes,
        memory=bench.memory,
        rows=tuple(bench.rows),
        interrupted=interrupted,
    )


def _checked(plan: Plan) -> LoadPlan:
    model = plan_load(plan.settings.model, **plan.settings.engine_options)
    if model.checkpoint.layout != "gguf":
        raise usage_error(f"{plan.settings.model} is not a .gguf file, which llama.cpp needs")
    longest = {
        "--prefill": plan.prefill_tokens,
        "--prompt-tokens and --new-tokens": plan.prompt_tokens + plan.new_tokens,
        "--job-prompt-tokens and --job-new-tokens": plan.jobs.longest_tokens,
    }
    for options, tokens in longest.items():
        if tokens >= model.config.max_context:
            raise usage_error(
                f"{options} must leave room for one more token in the model's context of "
                f"{model.config.max_context} (got {tokens})"
            )
    loads = {"max_sequences": max(*plan.batches, plan.slots), "max_context": max(longest.values())}
    return plan_load(plan.settings.model, **plan.settings.engine_options | loads)


@contextmanager
def _our_own() -> Iterator[None]:
    """Lets a row say that our engine failed, and not the peer."""
    try:
        yield
    except CannotRun as cannot:
        raise CannotRun(f"our own engine failed: {cannot}") from None


class _Bench:
    """The state of one run."""

    def __init__(
        self,
        plan: Plan,
        model: LoadPlan,
        now: Callable[[str], None],
        measured: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._model = model
        self._now = now
        self._measured = measured
        # Each pass has its own prompts, because our engine caches prefixes.
        self._seeds = count(plan.jobs.seed)
        self.versions: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.memory: dict[str, Memory] = {}
        self.rows: list[BatchRow | JobsRow | Skipped] = []

    def measure(self) -> None:
        """Fills ``rows``, each as soon as its passes are done or have ended early."""
        batch_peers = [peer for peer in self._plan.peers if peer in BATCH_PEERS]
        if batch_peers:
            self._batches_of(batch_peers)
        for peer in self._plan.peers:
            if peer in JOB_PEERS:
                self._jobs_of(peer)

    def _batches_of(self, peers: list[str]) -> None:
        """Measures ours against every peer, each time in new processes."""
        terms = self._terms(max(self._plan.batches))
        with TemporaryDirectory(prefix="llorch-bench-") as folder:
            bits = weight_bits(self._model.checkpoint)
            conversions = Conversions(terms.model, bits, Path(folder), terms.threads)
            for peer in peers:
                try:
                    self._against(peer, terms, conversions)
                except CannotRun as cannot:
                    self._skip(peer, "all", cannot)

    def _jobs_of(self, peer: str) -> None:
        """Measures mixed jobs through ``peer`` and through ours."""
        plan = self._plan
        terms = replace(self._terms(plan.slots), context_tokens=plan.jobs.longest_tokens + 1)
        try:
            theirs = self._service(peer, terms)
            # Two models are in memory: theirs and ours.
            self._require_memory(2)
            passes = STOCK_PASSES if peer == STOCK_CELERY else plan.passes
            with theirs, OurQueue(terms, plan.slots) as ours:
                self.notes |= {peer: theirs.note, f"{LLORCH} through Redis": ours.note}
                self._jobs(peer, ours, theirs, passes)
        except CannotRun as cannot:
            self._skip(peer, _mixed(plan), cannot)

    def _against(self, peer: str, terms: Terms, conversions: Conversions) -> None:
        interpreter = interpreter_of(peer, self._plan.venvs, terms.threads)
        require_kv_dtype(peer, self._plan.settings.kv_dtype)
        # Two models are in memory: theirs and ours.
        self._require_memory(2)
        weights = conversions.weights(peer)
        if weights:
            self._now(f"{peer}'s conversion")
        converted = replace(terms, model=conversions.model_for(peer, interpreter))
        self._now(f"the load of {LLORCH} and {peer}")
        with ContestantProcess(peer, converted, interpreter) as theirs, ExitStack() as stack:
            with _our_own():
                ours = stack.enter_context(ContestantProcess(LLORCH, terms))
            self.notes[LLORCH] = ours.ready.note
            self.versions |= theirs.ready.versions
            self.notes[peer] = (
                f"{weights.note}, {theirs.ready.note}" if weights else theirs.ready.note
            )
            for kind, load in self._loads():
                self._now(f"{peer}: {_title(kind, load)}")
                try:
                    self._batch(ours, theirs, kind, load)
                except CannotRun as cannot:
                    self._skip(peer, _title(kind, load), cannot)
                    # A process ended with the failure.
                    return
            self.memory |= {peer: theirs.memory(), LLORCH: ours.memory()}

    def _loads(self) -> Iterator[tuple[BatchKind, Load]]:
        plan = self._plan
        yield "prefill", Load(plan.prefill_tokens, 1, 1, 0.0, 0)
        for sequences in plan.batches:
            yield "decode", Load(plan.prompt_tokens, plan.new_tokens, sequences, 0.0, 0)

    def _work(self, kind: BatchKind, load: Load) -> Work:
        load = replace(load, seed=next(self._seeds))
        prompts = (
            each.prompt_token_ids or () for each in load.requests(self._model.config.vocab_size)
        )
        return Work(kind, tuple(map(tuple, prompts)), load.new_tokens, load.seed)

    def _batch(
        self, ours: ContestantProcess, theirs: ContestantProcess, kind: BatchKind, load: Load
    ) -> None:
        warm_up = self._work(kind, load)
        _our_own()(ours.warm_up)(warm_up)
        theirs.warm_up(warm_up)

        def row(pairs: list[tuple[Rate, Rate]]) -> BatchRow:
            return BatchRow(
                kind=kind,
                peer=theirs.name,
                sequences=load.concurrency,
                prompt_tokens=load.prompt_tokens,
                passes=len(pairs),
                ours=Side.of([mine.tokens_per_s for mine, _ in pairs]),
                theirs=Side.of([their.tokens_per_s for _, their in pairs], pairs[0][1].note),
                ratio=median(mine.tokens_per_s / their.tokens_per_s for mine, their in pairs),
            )

        works = (self._work(kind, load) for _ in range(self._plan.passes))
        pairs = alternate(_our_own()(ours.run), theirs.run, works)
        self._add_row(f"{theirs.name}: {_title(kind, load)}", pairs, row)

    def _jobs(self, peer: str, ours: JobService, theirs: JobService, passes: int) -> None:
        plan = self._plan
        warm_up = replace(
            plan.jobs,
            jobs=min(plan.jobs.jobs, plan.slots),
            new_tokens=(2, 2),
            seed=next(self._seeds),
        )
        self._now(f"{peer}: the warm-up")
        for service in (ours, theirs):
            service.run(warm_up.requests(self._model.config.vocab_size))

        def loads() -> Iterator[list[GenerationRequest]]:
            for number in range(passes):
                self._now(f"{peer}: {_mixed(plan)}, pass {number + 1} of {passes}")
                load = replace(plan.jobs, seed=next(self._seeds))
                yield load.requests(self._model.config.vocab_size)

        def row(pairs: list[tuple[Throughput, Throughput]]) -> JobsRow:
            return JobsRow(
                peer=peer,
                jobs=plan.jobs.jobs,
                passes=len(pairs),
                ours=Side.of([mine.tokens_per_s for mine, _ in pairs]),
                theirs=Side.of([their.tokens_per_s for _, their in pairs]),
                our_jobs_per_s=median(mine.jobs_per_s for mine, _ in pairs),
                their_jobs_per_s=median(their.jobs_per_s for _, their in pairs),
                ratio=median(mine.jobs_per_s / their.jobs_per_s for mine, their in pairs),
            )

        self._add_row(f"{peer}: {_mixed(plan)}", alternate(ours.run, theirs.run, loads()), row)

    def _add_row(
        self,
        title: str,
        pairs: Iterator[tuple[Pass, Pass]],
        row: Callable[[list[tuple[Pass, Pass]]], BatchRow | JobsRow],
    ) -> None:
        """Runs the passes, ours and theirs, and adds the row of those that were finished."""
        done: list[tuple[Pass, Pass]] = []
        try:
            for mine, their in pairs:
                done.append((mine, their))
                self._measured(
                    f"{title}, pass {len(done)}: {mine.tokens_per_s:,.1f} / "
                    f"{their.tokens_per_s:,.1f} tokens/s: "
                    f"{mine.tokens_per_s / their.tokens_per_s:.2f}"
                )
        finally:
            if done:
                self.rows.append(row(done))

    def _skip(self, peer: str, what: str, cannot: CannotRun) -> None:
        self.rows.append(Skipped(peer=peer, what=what, reason=str(cannot)))
        self._measured(f"{peer}: {what}: skipped: {cannot}")

    def _service(self, peer: str, terms: Terms) -> JobService:
        require_kv_dtype(peer, terms.kv_dtype)
        if peer == STOCK_CELERY:
            require_installed(peer)
            return StockCelery(terms)
        return LlamaServer(llama_server(self._plan.llama_server), terms, self._plan.slots)

    def _terms(self, most_sequences: int) -> Terms:
        plan = self._plan
        return Terms(
            model=plan.settings.model.resolve(),
            dtype=self._model.dtype_name,
            threads=plan.threads,
            most_sequences=most_sequences,
            context_tokens=max(plan.prefill_tokens + 1, plan.prompt_tokens + plan.new_tokens),
            prefill_tokens=plan.prefill_tokens,
            kv_dtype=plan.settings.kv_dtype,
        )

    def _require_memory(self, copies: int) -> None:
        """Checks that there is memory for the load: at least the weights, in file or in dtype."""
        model = self._model
        kv_bytes = model.num_blocks * model.block_bytes
        weights_bytes = max(model.weights_bytes, file_bytes(model.checkpoint))
        needed = copies * (weights_bytes + kv_bytes)
        free = psutil.virtual_memory().available
        if needed > free:
            raise CannotRun(
                f"needs about {human_bytes(needed)} more memory, but only "
                f"{human_bytes(free)} is free"
            )


def _mixed(plan: Plan) -> str:
    return counted(plan.jobs.jobs, "mixed job")


def _title(kind: BatchKind, load: Load) -> str:
    if kind == "prefill":
        return f"prefill of {counted(load.prompt_tokens, 'token')}"
    return f"decode of {counted(load.concurrency, 'sequence')}"
