"""The engine's interface: load, submit, logits, stats, close."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from llorch_worker.allocator import return_freed_memory
from llorch_worker.cache import BlockPool, PagedKV, Places, UnifiedCache
from llorch_worker.contract import (
    TASK_NAME,
    TEXT_TASKS,
    AnyTextsRequest,
    Fault,
    GenerationRequest,
    InvalidRequest,
    Journal,
    TextsRequest,
)
from llorch_worker.contract.generation_config import GenerationConfig
from llorch_worker.engine.core import EngineCore
from llorch_worker.engine.device.queue import DeviceQueue, begin_thread, use_device
from llorch_worker.engine.device.thread_count import ThreadCount
from llorch_worker.engine.device.warm_up import (
    compile_kernels,
    compiles_late,
    run_first_requests,
)
from llorch_worker.engine.draft_planner import DraftPlanner
from llorch_worker.engine.drafter import drafter_maker
from llorch_worker.engine.generation import Generation
from llorch_worker.engine.interface import Attempt, EngineStats, ModelFacts
from llorch_worker.engine.loading import LoadedModel, load_as_planned, part_of_load
from llorch_worker.engine.memory.compute_device import resolve_device, visible_cards
from llorch_worker.engine.memory.encoder_plan import asked_rule
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.engine.memory.workspace import DRAFT_ROWS, scored_rows
from llorch_worker.engine.runner import Runner
from llorch_worker.engine.sampling.sampler import Sampler
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence_maker import SequenceMaker
from llorch_worker.engine.shared_core import SharedCore
from llorch_worker.engine.stats import Counters, StepCounts
from llorch_worker.engine.texts_core import TextsCore
from llorch_worker.engine.texts_generation import TextsGeneration
from llorch_worker.engine.thread import EngineThread, Outlet, ThreadedEngine
from llorch_worker.engine_options import EngineOptions
from llorch_worker.intake.constraints.compiler import LARGE_VOCABULARY
from llorch_worker.intake.intake import Intake
from llorch_worker.intake.prepared import PreparedRequest
from llorch_worker.intake.process import IntakeProcess
from llorch_worker.intake.request_checks import check_model
from llorch_worker.intake.texts import PreparedTexts
from llorch_worker.kernels import cpu_threads, select_sample, select_truncate_rows
from llorch_worker.model import ForwardModel, RaggedBatch
from llorch_worker.model.encoder import Pooling
from llorch_worker.model.encoder.decoder import DecoderOfTexts, cache_of_texts
from llorch_worker.model.families.qwen import QWEN3
from llorch_worker.processes.board import Board
from llorch_worker.settings import default_model_name
from llorch_worker.text import Tokenizer
from llorch_worker.text.control_tokens import AroundTurns
from llorch_worker.weights import Checkpoint, fingerprint

logger = logging.getLogger(__name__)


class Engine(ThreadedEngine):
    """One model on one device, shared by all jobs through continuous batching.

    Any thread may call any method. Only the engine's own thread touches model and cache; it sleeps
    while there is nothing to do.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        tokenizer: Tokenizer,
        model_name: str,
        fingerprint: str = "",
        generation_config: GenerationConfig | None = None,
        options: EngineOptions,
        queue: DeviceQueue | None = None,
        num_threads: int | None = None,
        board: Board | None = None,
        outlet: Outlet | None = None,
        intake: IntakeProcess | None = None,
    ) -> None:
        """Makes an engine from loaded parts; :meth:`load` loads them from a file.

        ``fingerprint``: see :func:`.fingerprint`. ``generation_config``: what senders of jobs may
        take; the engine does nothing with it. ``queue`` runs the steps; None: the device's own.
        ``num_threads`` are torch's CPU threads for the engine; as the caller's if None. ``board``
        and ``outlet`` are of an engine whose keeper is another process. ``intake`` prepares
        requests in place of the caller's thread.
        """
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.config = config = loaded.model.config
        self.cache = cache = loaded.cache
        self.max_context = cache.max_context
        self._loaded = loaded
        self._measured_bytes: dict[str, int] = {}
        self._counters = Counters()
        self._board = board or Board(options.sequences)
        self._device = device = cache.shape.device
        self._sizes = (options.sequences, options.step_tokens)
        self.pooling = None if options.made_of is None else Pooling(options.made_of)
        self.facts = ModelFacts(
            model_name=model_name,
            fingerprint=fingerprint,
            arithmetic=loaded.arithmetic,
            max_context=cache.max_context,
            max_sequences=options.sequences,
            vocab_size=config.vocab_size,
            pool_tokens=cache.blocks.total * cache.block_size,
            drafts=options.drafts,
            drafter=options.drafter,
            generation_config=generation_config or {},
            device=str(device),
            card_uuids=visible_cards(device),
            tasks=(TASK_NAME,) if self.pooling is None else (TASK_NAME, *TEXT_TASKS),
            width=0 if self.pooling is None else config.hidden_size,
            # A decode never waits for more than a step.
            longest_text=0 if self.pooling is None else min(cache.max_context, options.step_tokens),
            asks_as_qwen3=config.family == QWEN3.name,
        )
        self._intake = Intake(tokenizer, self.facts.limits)
        self._intake_process = intake
        self._sequence_maker = SequenceMaker(
            tokenizer,
            self._intake.compiler,
            vocab_size=config.vocab_size,
            make_drafter=drafter_maker(options) if options.drafts else None,
        )
        self._scheduler = Scheduler(
            cache.blocks,
            cache.windows,
            block_size=cache.block_size,
            max_sequences=options.sequences,
            max_step_tokens=options.step_tokens,
            prefix_caching=options.prefix_caching,
            prefix_sharing=options.prefix_sharing,
            planner=DraftPlanner(DRAFT_ROWS) if options.drafts else None,
            low_waits_at_most_s=options.low_waits_at_most_s,
        )
        sampler = Sampler(
            config.vocab_size,
            device,
            select_sample(device, options.kernels),
            select_truncate_rows(device, options.kernels),
        )
        self._scored_rows = scored_rows(config, cache.shape, loaded.model.ops, *self._sizes)
        runner = Runner(loaded.steps, cache, sampler, device, queue, scored_rows=self._scored_rows)
        most_threads = num_threads or torch.get_num_threads()
        # The bits of torch's own kernels may depend on the number of threads.
        fewer_threads = loaded.model.ops.name == "native" and most_threads > 1
        threads = ThreadCount(most_threads) if fewer_threads else None
        self._core = EngineCore(
            self._scheduler,
            runner,
            self._counters,
            tokenizer.text_and_bytes,
            threads,
            board=self._board,
        )
        self._texts: TextsCore | None = None
        core: EngineCore | SharedCore = self._core
        if self.pooling is not None:
            reader = DecoderOfTexts(loaded.model, cache_of_texts(cache, options.cell_tokens))
            self._texts = TextsCore(
                partial(reader.vectors, pooling=self.pooling),
                options.step_tokens,
                counters=self._counters,
                low_waits_at_most_s=options.low_waits_at_most_s,
                board=self._board,
            )
            core = SharedCore(self._core, self._texts, threads)
        self._thread: EngineThread[Any] = EngineThread(
            core,
            name=f"llorch-engine-{model_name}",
            begin=partial(begin_thread, device, num_threads),
            board=self._board,
            outlet=outlet,
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        options: EngineOptions | None = None,
        *,
        model_name: str | None = None,
        num_threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        intake: IntakeProcess | None = None,
        around: Callable[[], AroundTurns] | None = None,
        around_model: Callable[[ForwardModel], ForwardModel] | None = None,
        board: Board | None = None,
        outlet: Outlet | None = None,
        checkpoint: Checkpoint | None = None,
        **changed: Any,
    ) -> Engine:
        """Loads a .gguf file or a Hugging Face folder and allocates its cache.

        A card becomes the calling thread's current card.

        Args:
            changed: fields of :class:`.EngineOptions`, such as ``device="cpu"``, in place of those
                of ``options``.
            num_threads: torch's CPU threads, process-wide; by default those of
                :func:`cpu_threads`, for the engine alone.
            progress: called with the bytes loaded and the bytes in total.
            intake: one for the same file, which prepares requests within limits of time and
                memory. Without it, the calling threads do: what a chat template computes there has
                no limit.
            around: what an intake elsewhere has found; called when the tokenizer is loaded. See
                :meth:`.LoadPlan.tokenizer`.
            around_model: wraps the model that the engine runs, to watch or time it.
            board, outlet: of an engine whose keeper is another process.
            checkpoint: the file, if it is open.

        Raises:
            ModelLoadFailed: there is no such file or device, the file cannot be served, memory is
                short, or there is no compiler for the card's kernels.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        options = replace(options or EngineOptions(), **changed)
        place = resolve_device(options.device)
        choose_threads = num_threads is None and place.type == "cpu"
        use_device(place)
        plan = plan_load(path, replace(options, device=str(place)), checkpoint)
        if intake is not None:
            around = intake.around
        tokenizer = plan.tokenizer(around)
        generation_config, ignored = plan.generation_config
        for sentence in ignored:
            logger.warning("%s", sentence)
        loaded = load_as_planned(plan.require_fit(), progress)
        if around_model is not None:
            loaded = replace(loaded, steps=around_model(loaded.steps))
        engine = cls(
            loaded,
            tokenizer=tokenizer,
            model_name=model_name or default_model_name(Path(path)),
            # After the load, which leaves the file in the page cache if it fits there.
            fingerprint=fingerprint(plan.checkpoint, asked_rule(plan.checkpoint, options)),
            generation_config=generation_config,
            options=plan.options,
            num_threads=cpu_threads(plan.weights_bytes) if choose_threads else num_threads,
            board=board,
            outlet=outlet,
            intake=intake,
        )
        if compiles_late(place):
            try:
                with part_of_load("a step", place, plan.workspace_bytes):
                    # On the engine's own thread, because libraries keep state per thread.
                    sizes = (*engine._sizes, engine._scored_rows)
                    compiled = partial(compile_kernels, loaded.model, loaded.cache, *sizes)
                    engine._thread.call(compiled)
            except BaseException:
                engine.close()
                raise
        return engine

    def warm_up(self) -> None:
        """Runs requests that need as much memory as jobs, then measures memory for :meth:`stats`.

        It also prepares for grammars where running jobs would notice the wait, and returns what the
        load has freed. Call it once, before the first job.
        """
        # A small vocabulary takes 0.1 s, and most workers get no grammar.
        if self._device.type != "cpu" or self.config.vocab_size >= LARGE_VOCABULARY:
            self._intake.compiler.prepare()
        if (planner := self._scheduler.planner) is not None:
            max_sequences, max_step_tokens = self._sizes
            rows = min(max_sequences + planner.most_rows, max_step_tokens)
            self._thread.call(partial(planner.measure, self._loaded.steps, self.cache, rows))
        if self._texts is not None:
            self._thread.call(partial(self._texts.warm_up, self.facts.longest_text))
        run_first_requests(self.submit, self._device, self.max_context, *self._sizes)
        return_freed_memory()
        self._measured_bytes = self._loaded.measured_bytes()
        # No job's steps were among them.
        self._counters.steps = StepCounts()

    @overload
    def submit(
        self, request: GenerationRequest | PreparedRequest, **attempt: Unpack[Attempt]
    ) -> Generation: ...

    @overload
    def submit(
        self, request: AnyTextsRequest | PreparedTexts, **attempt: Unpack[Attempt]
    ) -> TextsGeneration: ...

    def submit(
        self,
        request: GenerationRequest | PreparedRequest | AnyTextsRequest | PreparedTexts,
        **attempt: Unpack[Attempt],
    ) -> Generation | TextsGeneration:
        """Checks the request in the caller's thread and queues it.

        ``token_ids`` of the result include the end-of-sequence or stop token that ended the choice;
        ``text`` does not. Without a seed, one is derived from the job's id and returned with the
        result.

        Args:
            request: also what an intake with this engine's ``limits`` has made of one; then the
                model that it names was checked before.
            attempt: see :class:`.Attempt`.

        Raises:
            ModelNotServed: the request names another model.
            ContextLengthExceeded: prompt and ``max_tokens`` do not fit.
            InvalidRequest: an id is beyond the vocabulary, the prompt has no token, or the grammar
                of the text does not compile.
            InternalError: the engine is closed or broken, or the journal is another request's.
        """
        if isinstance(request, TextsRequest | PreparedTexts):
            return self._submit_texts(request, **attempt)
        journal, suspect = attempt.get("journal"), attempt.get("suspect", False)
        prepared = (
            request if isinstance(request, PreparedRequest) else self._prepare(request, journal)
        )
        attempt["job_id"] = job_id = attempt.get("job_id") or str(uuid.uuid4())
        generation = Generation(
            prepared.request,
            self.facts,
            self._sequence_maker.make(prepared, job_id, journal, suspect=suspect),
            request_cancel=self._thread.cancel,
            checks=None if prepared.grammar is None else prepared.grammar.checks,
            **attempt,
        )
        self._thread.add(generation)
        return generation

    def _prepare(self, request: GenerationRequest, journal: Journal | None) -> PreparedRequest:
        check_model(request, self.model_name)
        generated = 0 if journal is None else journal.most_tokens
        if self._intake_process is None:
            return self._intake.prepare(request, generated)
        return self._intake_process.prepare(request, self.facts.limits, generated)

    def logits(self, token_ids: Ids[int]) -> torch.Tensor:
        """The model's logits after each of ``token_ids``: [tokens, vocab] float32.

        One pass between two steps computes them and leaves no keys or values behind. Raises
        ``InvalidRequest`` for no ids, unknown ids, or more ids than the context holds.
        """
        ids = list(token_ids)
        _check_token_ids(ids, self.max_context, self.config.vocab_size)
        return self._thread.call(lambda: _uncached_logits(self._loaded.steps, self.cache, ids))

    def stats(self) -> EngineStats:
        """The engine's figures, read without stopping it."""
        counters, blocks, texts = self._counters, self.cache.blocks, self._texts
        held = self._loaded.bytes_by_part()
        return EngineStats(
            model=self.model_name,
            device=self.facts.device,
            dtype=str(self.cache.shape.dtype).removeprefix("torch."),
            bytes=held,
            planned_bytes={**held, "workspace": self._loaded.workspace_bytes},
            measured_bytes=self._measured_bytes,
            max_context=self.max_context,
            max_sequences=self.facts.max_sequences,
            running=len(self._scheduler.running) + (texts.running if texts else 0),
            waiting=len(self._scheduler.waiting),
            tokens_per_s=counters.rate.read(),
            kv_blocks_total=blocks.total,
            kv_blocks_free=blocks.free_count,
            kv_blocks_kept=blocks.kept_count,
            prompt_tokens_total=counters.prompt_tokens_total,
            cached_tokens_total=self._scheduler.blocks.found_tokens_total,
            prefix_hits_total=self._scheduler.blocks.hits_total,
            completion_tokens_total=counters.completion_tokens_total,
            finished_total=counters.finished_total,
            preempted_total=self._scheduler.preempted_total,
            steps_total=counters.steps_total,
            drafts_total=counters.drafts_total,
            draft_tokens_total=counters.draft_tokens_total,
            accepted_draft_tokens_total=counters.accepted_draft_tokens_total,
        )

    @property
    def matrix_bytes(self) -> int:
        """Bytes of all matrices that a step multiplies by."""
        return self._loaded.model.matrix_bytes

    def misplaced_tensors(self) -> tuple[str, ...]:
        """Tensors of model and cache that are not on the engine's device, such as
        ``blocks.0.mlp.down.weight on cpu``; empty unless something is broken."""
        return self._loaded.misplaced_tensors()

    def check_integrity(self) -> None:
        """Raises unless every KV block is free or held by the sequences that list it."""
        self._thread.call(self._scheduler.check_integrity)


def _check_token_ids(token_ids: list[int], max_context: int, vocab_size: int) -> None:
    """Raises ``InvalidRequest`` for no ids, more than ``max_context``, or unknown ones."""
    faults = []
    if not 1 <= len(token_ids) <= max_context:
        rule = f"must be 1 to {max_context} tokens"
        faults.append(Fault(field="token_ids", rule=rule, got=f"{len(token_ids)} tokens"))
    if any(not 0 <= token_id < vocab_size for token_id in token_ids):
        rule = f"token ids must be below {vocab_size}, the vocabulary's size"
        faults.append(Fault(field="token_ids", rule=rule, got="an id beyond it"))
    if faults:
        raise InvalidRequest.from_faults(faults)


def _uncached_logits(
    model: ForwardModel, cache: UnifiedCache, token_ids: list[int]
) -> torch.Tensor:
    """[tokens, vocab] float32, on the CPU.

    Uses the RoPE tables and masks of ``cache`` but its own keys and values, so it works when every
    block is held, and leaves nothing behind.
    """
    device = cache.shape.device
    count = len(token_ids)
    num_blocks = -(-count // cache.block_size)
    kv = PagedKV(cache.shape, [num_blocks] * len(cache.shape.groups))
    row = torch.arange(count, device=device)
    tables = torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0)
    batch = RaggedBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=row,
        query_lengths=(count,),
        context_lengths=(count,),
        places=(Places(tables, row),) * len(kv.groups),
        logits_rows=row,
    )
    logits = model.forward(batch, replace(cache, kv=kv, blocks=BlockPool(num_blocks)))
    # Callers may write to the clone; a tensor made in inference mode is read-only.
    with torch.inference_mode(False):
        return logits.cpu().clone()
