"""Our engine and its peers on one file and one load. Peers run one at a time; passes alternate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from statistics import median

import psutil

from benches.peers.contestants.contestant import (
    LLORCH,
    BatchKind,
    CannotRun,
    Rate,
    Terms,
    Work,
)
from benches.peers.contestants.process import ContestantProcess
from benches.peers.contestants.roster import (
    BATCH_PEERS,
    LLAMA_SERVER,
    require_installed,
    require_kv_dtype,
    server_binary,
)
from benches.peers.figures import Kind, PeersFigures, Row, Side, Skipped, Wanted
from benches.peers.services import llama_server, our_queue
from llorch_worker.bench.instruments.alternating import alternate
from llorch_worker.bench.instruments.client_load import Throughput
from llorch_worker.bench.instruments.provenance import provenance
from llorch_worker.bench.load import Load
from llorch_worker.bench.plan import Plan
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.engine.memory.load_plan import LoadPlan, plan_load
from llorch_worker.weights.contents import file_bytes, tensor_types


def measure_peers(plan: Plan, wanted: Wanted, measured: Callable[[str], None]) -> PeersFigures:
    """All rows; the row of a peer that cannot take part says why.

    ``measured`` receives what each pass gave. After an interrupt the figures have what there is;
    before the first row it is raised.

    Raises:
        CommandError: the model is not a GGUF file or has too short a context.
    """
    model = _checked(plan, wanted)
    bench = _Bench(plan, wanted, model, measured)
    interrupted = False
    try:
        bench.measure()
    except KeyboardInterrupt:
        if not bench.rows:
            raise
        interrupted = True
    return PeersFigures(
        provenance=provenance(
            device="cpu", seed=wanted.jobs.seed, program=("python", "-m", "benches.peers")
        ),
        model=plan.settings.model,
        file_types=tuple(kind.name for kind in tensor_types(model.checkpoint)),
        dtype=model.dtype_name,
        kv_dtype=plan.settings.kv_dtype,
        wanted=wanted,
        passes=plan.passes,
        versions=bench.versions,
        notes=bench.notes,
        rows=tuple(bench.rows),
        interrupted=interrupted,
    )


def _checked(plan: Plan, wanted: Wanted) -> LoadPlan:
    settings = plan.settings
    model = plan_load(settings.model, settings.engine_options)
    if model.checkpoint.layout != "gguf":
        raise usage_error(f"{settings.model} is not a .gguf file, which llama.cpp needs")
    longest = {}
    if any(peer in BATCH_PEERS for peer in wanted.peers):
        longest["--prefill"] = wanted.prefill_tokens
        longest["--prompt-tokens and --new-tokens"] = wanted.prompt_tokens + wanted.new_tokens
    if LLAMA_SERVER in wanted.peers:
        longest["--job-prompt-tokens and --job-new-tokens"] = wanted.jobs.longest_tokens
    for options, tokens in longest.items():
        if tokens >= model.config.max_context:
            raise usage_error(
                f"{options} must leave room for one more token in the model's context of "
                f"{model.config.max_context} (got {tokens})"
            )
    loaded = replace(
        settings.engine_options,
        max_sequences=max(*wanted.batches, wanted.slots),
        max_context=max(longest.values()),
    )
    return plan_load(settings.model, loaded)


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
        self, plan: Plan, wanted: Wanted, model: LoadPlan, measured: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._wanted = wanted
        self._model = model
        self._measured = measured
        # Each pass has its own prompts, because our engine caches prefixes.
        self._seeds = count(wanted.jobs.seed)
        self.versions: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.rows: list[Row | Skipped] = []

    def measure(self) -> None:
        """Fills ``rows``, each as soon as its passes are done or have ended early."""
        terms = self._terms(max(self._wanted.batches))
        for peer in self._wanted.peers:
            if peer in BATCH_PEERS:
                with self._skipping(peer, "all"):
                    self._against(peer, terms)
        if LLAMA_SERVER in self._wanted.peers:
            with self._skipping(LLAMA_SERVER, self._mixed):
                self._mixed_jobs()

    @contextmanager
    def _skipping(self, peer: str, what: str) -> Iterator[None]:
        """Turns :class:`CannotRun` into a row."""
        try:
            yield
        except CannotRun as cannot:
            self.rows.append(Skipped(peer=peer, what=what, reason=str(cannot)))
            self._measured(f"{peer}: {what}: skipped: {cannot}")

    def _against(self, peer: str, terms: Terms) -> None:
        """Measures ours against ``peer``, both in new processes."""
        require_installed(peer)
        require_kv_dtype(peer, terms.kv_dtype)
        self._require_memory()
        self._plan.now(f"the load of {LLORCH} and {peer}")
        with ContestantProcess(peer, terms) as theirs, ExitStack() as stack:
            with _our_own():
                ours = stack.enter_context(ContestantProcess(LLORCH, terms))
            self.notes[LLORCH] = ours.ready.note
            self.versions |= theirs.ready.versions
            self.notes[peer] = theirs.ready.note
            for kind, load in self._loads():
                with self._skipping(peer, _title(kind, load)):
                    self._batch(ours, theirs, kind, load)
                if isinstance(self.rows[-1], Skipped):
                    # A process ended with the failure.
                    return

    def _loads(self) -> Iterator[tuple[BatchKind, Load]]:
        wanted = self._wanted
        yield "prefill", Load.alike(1, wanted.prefill_tokens, 1, 0)
        for sequences in wanted.batches:
            yield "decode", Load.alike(sequences, wanted.prompt_tokens, wanted.new_tokens, 0)

    def _batch(
        self, ours: ContestantProcess, theirs: ContestantProcess, kind: BatchKind, load: Load
    ) -> None:
        def work() -> Work:
            seed = next(self._seeds)
            requests = replace(load, seed=seed).requests(self._model.config.vocab_size)
            prompts = tuple(tuple(each.prompt_token_ids or ()) for each in requests)
            return Work(kind, prompts, load.new_tokens[0], seed)

        title = f"{theirs.name}: {_title(kind, load)}"
        self._plan.now(title)
        warm_up = work()
        _our_own()(ours.warm_up)(warm_up)
        theirs.warm_up(warm_up)
        works = (work() for _ in range(self._plan.passes))
        pairs = alternate(_our_own()(ours.run), theirs.run, works)
        self._add_row(title, pairs, kind, theirs.name, load.jobs, load.prompt_tokens[0])

    def _mixed_jobs(self) -> None:
        """Measures mixed jobs through llama.cpp's server and through our queue."""
        wanted, jobs = self._wanted, self._wanted.jobs
        terms = replace(self._terms(wanted.slots), context_tokens=jobs.longest_tokens + 1)
        require_kv_dtype(LLAMA_SERVER, terms.kv_dtype)
        service = llama_server(server_binary(wanted.llama_server), terms, wanted.slots)
        self._require_memory()
        title = f"{LLAMA_SERVER}: {self._mixed}"

        def requests(load: Load) -> list[GenerationRequest]:
            fresh = replace(load, seed=next(self._seeds))
            return fresh.requests(self._model.config.vocab_size)

        with service as theirs, our_queue(terms, wanted.slots) as ours:
            self.notes |= {LLAMA_SERVER: theirs.note, f"{LLORCH} through Redis": ours.note}
            self._plan.now(title)
            warm_up = replace(jobs, jobs=min(jobs.jobs, wanted.slots), new_tokens=(2, 2))
            for each in (ours, theirs):
                each.run(requests(warm_up))
            loads = (requests(jobs) for _ in range(self._plan.passes))
            pairs = alternate(ours.run, theirs.run, loads)
            self._add_row(title, pairs, "jobs", LLAMA_SERVER, jobs.jobs, None)

    def _add_row(
        self,
        title: str,
        pairs: Iterator[tuple[Rate, Rate]] | Iterator[tuple[Throughput, Throughput]],
        kind: Kind,
        peer: str,
        number: int,
        prompt_tokens: int | None,
    ) -> None:
        """Runs the passes, ours and theirs, and adds the row of those that were finished."""
        done: list[tuple[Rate | Throughput, Rate | Throughput]] = []
        ratios: list[float] = []
        try:
            for mine, their in pairs:
                done.append((mine, their))
                ratios.append(mine.tokens_per_s / their.tokens_per_s)
                self._measured(
                    f"{title}, pass {len(done)}: {mine.tokens_per_s:,.1f} / "
                    f"{their.tokens_per_s:,.1f} tokens/s: {ratios[-1]:.2f}"
                )
        finally:
            if done:
                row = Row(
                    kind=kind,
                    peer=peer,
                    count=number,
                    prompt_tokens=prompt_tokens,
                    passes=len(done),
                    ours=Side.of([mine for mine, _ in done]),
                    theirs=Side.of([their for _, their in done]),
                    ratio=median(ratios),
                )
                self.rows.append(row)

    def _terms(self, most_sequences: int) -> Terms:
        wanted = self._wanted
        return Terms(
            model=self._plan.settings.model.resolve(),
            dtype=self._model.dtype_name,
            threads=wanted.threads,
            most_sequences=most_sequences,
            context_tokens=max(wanted.prefill_tokens + 1, wanted.prompt_tokens + wanted.new_tokens),
            prefill_tokens=wanted.prefill_tokens,
            kv_dtype=self._plan.settings.kv_dtype,
        )

    def _require_memory(self) -> None:
        """Checks that there is memory for two models, ours and theirs: at least the weights, in
        file or in dtype."""
        model = self._model
        kv_bytes = model.kv_bytes(model.num_blocks)
        weights_bytes = max(model.weights_bytes, file_bytes(model.checkpoint))
        needed, free = 2 * (weights_bytes + kv_bytes), psutil.virtual_memory().available
        if needed > free:
            raise CannotRun(
                f"needs about {human_bytes(needed)} more memory, but only "
                f"{human_bytes(free)} is free"
            )

    @property
    def _mixed(self) -> str:
        return counted(self._wanted.jobs.jobs, "mixed job")


def _title(kind: BatchKind, load: Load) -> str:
    if kind == "prefill":
        return f"prefill of {counted(load.prompt_tokens[0], 'token')}"
    return f"decode of {counted(load.jobs, 'sequence')}"
