"""The engine as others see it: load, submit, logits, stats, close."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from collections.abc import Sequence as Ids
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import (
    Event,
    Fault,
    GenerationRequest,
    InvalidRequest,
    Journal,
    ModelLoadFailed,
)
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine.core import EngineCore
from llorch_worker.engine.device.graphs import CudaRecorder, DecodeGraphs, records_decode
from llorch_worker.engine.device.queue import DeviceQueue, use_device
from llorch_worker.engine.device.warm_up import compiles_late, warm_up
from llorch_worker.engine.generation import Generation
from llorch_worker.engine.memory.block_plan import allocate_cache, require_room
from llorch_worker.engine.memory.load_errors import part_of_load
from llorch_worker.engine.memory.placement import resolve_device, resolve_dtype
from llorch_worker.engine.memory.resident_tensors import resident_tensors, storage_bytes
from llorch_worker.engine.memory.workspace import workspace_bytes
from llorch_worker.engine.request_checks import check_model, checked_prompt
from llorch_worker.engine.resume import resume
from llorch_worker.engine.runner import ForwardModel, Runner
from llorch_worker.engine.sampling.sampler import Sampler
from llorch_worker.engine.sampling.uniforms import choice_seed, job_seed
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.stats import Counters, EngineStats
from llorch_worker.engine.thread import EngineThread
from llorch_worker.engine.uncached_logits import uncached_logits
from llorch_worker.kernels import (
    TruncateRows,
    end_own_threads,
    select_ops,
    select_sample,
    select_truncate_rows,
)
from llorch_worker.model import Llama, LlamaConfig, model_bytes, parameter_count, resolve_config
from llorch_worker.settings import KernelChoice, KvDtype, default_model_name
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.weights import open_checkpoint, select_linears

DEFAULT_MAX_SEQUENCES = 16
DEFAULT_MAX_STEP_TOKENS = 512


class Engine:
    """One model on one device, shared by all jobs through continuous batching.

    Any thread may call any method. One thread of the engine's own touches model and cache; it
    sleeps while there is nothing to do.
    """

    def __init__(
        self,
        *,
        model: ForwardModel,
        config: LlamaConfig,
        cache: UnifiedCache,
        tokenizer: Tokenizer,
        model_name: str,
        weight_bytes: int,
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS,
        prefix_caching: bool = True,
        workspace_bytes: int = 0,
        weights: object = None,
        kernels: KernelChoice = "auto",
        truncate_rows: TruncateRows | None = None,
        queue: DeviceQueue | None = None,
    ) -> None:
        """Of parts that are loaded already; :meth:`load` makes them from a file.

        The cache decides device, dtype and ``max_context``. At most ``max_sequences`` sequences
        run at once, and a step computes at most ``max_step_tokens`` tokens. With
        ``prefix_caching``, prompts that begin alike share the KV blocks of their beginning.
        ``workspace_bytes`` were planned for the steps. ``weights`` holds the weights, where
        ``model`` holds more. ``kernels`` sample; ``truncate_rows``, if given, truncates. ``queue``,
        by default that of the device, runs the steps.
        """
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.config = config
        self.cache = cache
        self.max_context = cache.max_context
        self.max_sequences = max_sequences
        self._model = model
        self._weights = weights or model
        self._weight_bytes = weight_bytes
        self._planned_bytes = {
            "weights": weight_bytes, **cache.bytes_by_part(), "workspace": workspace_bytes
        }  # fmt: skip
        self._measured_bytes: dict[str, int] = {}
        # A file may name ids that the model has no logits for; those can end nothing.
        self._eos_ids = frozenset(
            token_id for token_id in tokenizer.eos_token_ids if 0 <= token_id < config.vocab_size
        )
        self._arrivals = itertools.count()
        self._counters = Counters()
        self._device = device = cache.kv.keys.device
        self._scheduler = Scheduler(
            cache.blocks,
            block_size=cache.block_size,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            prefix_caching=prefix_caching,
        )
        sampler = Sampler(
            config.vocab_size,
            device,
            select_sample(device, kernels),
            truncate_rows,
        )
        runner = Runner(model, cache, sampler, device, queue)
        core = EngineCore(self._scheduler, runner, self._counters, self._token_text)
        self._thread = EngineThread(
            core, name=f"llorch-engine-{model_name}", begin=partial(use_device, device)
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        max_context: int | None = None,
        *,
        model_name: str | None = None,
        max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS,
        kv_cache_bytes: int | None = None,
        prefix_caching: bool = True,
        num_threads: int | None = None,
        kernels: KernelChoice = "auto",
        kv_dtype: KvDtype = "auto",
        cuda_graphs: bool = True,
        progress: Callable[[int, int], None] | None = None,
        around_model: Callable[[ForwardModel], ForwardModel] | None = None,
    ) -> Engine:
        """Loads a .gguf file or a Hugging Face folder and allocates its cache.

        A card becomes the calling thread's current one.

        Args:
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
            dtype: ``auto`` (see ``resolve_dtype``), ``float32``, ``bfloat16`` or ``float16``.
            max_context: tokens that a sequence may hold; by default the model's own context.
            kv_cache_bytes: by default enough for ``max_sequences`` full contexts, if they fit.
            prefix_caching: compute once what prompts that begin alike have in common.
            num_threads: torch's CPU threads, process-wide; untouched when None.
            kernels: ``auto``, the fastest that this machine allows, or ``torch``, uncompiled.
            kv_dtype: ``auto``, the compute dtype, or ``fp8`` or ``int8``: half the bytes or less,
                and an error that docs/GPU.md states.
            cuda_graphs: on CUDA, record decode steps and replay them.
            progress: called with bytes loaded and bytes in all.
            around_model: gives what the engine runs in the model's place: it, watched or timed.

        Raises:
            ModelLoadFailed: no such file or device, no Llama, not enough memory, or no compiler
                for the card's kernels.
        """
        path = Path(path)
        for name, value in (("max_sequences", max_sequences), ("max_step_tokens", max_step_tokens)):
            if value < 1:
                raise ModelLoadFailed(f"{name} must be at least 1 (got {value})")
        place = resolve_device(device)
        use_device(place)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        checkpoint = open_checkpoint(path)
        config = resolve_config(checkpoint)
        compute_dtype = resolve_dtype(
            dtype, place, parameters=parameter_count(config), kernels=kernels
        )
        if max_context is not None and not 1 <= max_context <= config.max_context:
            raise ModelLoadFailed(
                f"max_context {max_context} is outside 1 to {config.max_context}, "
                f"the context of {path.name}; leave it out for the model's own"
            )
        tokenizer = load_tokenizer(checkpoint)
        linears = select_linears(place, compute_dtype, kernels)
        planned = model_bytes(config, checkpoint, linears, compute_dtype)
        require_room(planned, place)
        ops = select_ops(place, compute_dtype, kernels, head_dim=config.head_dim, kv_dtype=kv_dtype)
        decode_rows = max_sequences if cuda_graphs and records_decode(place, ops) else 0
        with part_of_load("the weights", place, planned):
            model = Llama.load(
                checkpoint,
                config,
                dtype=compute_dtype,
                device=place,
                linears=linears,
                ops=ops,
                progress=progress,
            )
        max_context = max_context or config.max_context
        workspace = workspace_bytes(
            config,
            max_context=max_context,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            decode_rows=decode_rows,
            dtype=compute_dtype,
            device=place,
        )
        cache = allocate_cache(
            config,
            max_context,
            max_sequences=max_sequences,
            kv_cache_bytes=kv_cache_bytes,
            workspace_bytes=workspace,
            dtype=compute_dtype,
            device=place,
            kv_dtype=kv_dtype,
            decode_rows=decode_rows,
        )
        if place.type == "cuda":
            # A load may peak higher than any step.
            torch.cuda.reset_peak_memory_stats(place)
        steps: ForwardModel = model
        if decode_rows:
            with part_of_load("a step", place, workspace):
                steps = DecodeGraphs(model, cache, CudaRecorder(place))
        # This thread loads, the engine's own computes: two pools of threads would be too many.
        end_own_threads()
        engine = cls(
            model=steps if around_model is None else around_model(steps),
            config=config,
            cache=cache,
            tokenizer=tokenizer,
            model_name=model_name or default_model_name(path),
            weight_bytes=model.weight_bytes,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            prefix_caching=prefix_caching,
            workspace_bytes=workspace,
            weights=model,
            kernels=kernels,
            truncate_rows=select_truncate_rows(place, compute_dtype, kernels),
        )
        if compiles_late(place):
            try:
                with part_of_load("a step", place, workspace):
                    engine._warm_up(model, max_step_tokens)
            except BaseException:
                engine.close()
                raise
        return engine

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
    ) -> Generation:
        """Checks the request in the caller's thread and queues it.

        ``token_ids`` of the result hold every generated id, the end-of-sequence or stop token that
        ended the choice included; its ``text`` does not. A seed that is absent follows from the
        job's id, and is returned with the result.

        With a ``journal`` the generation goes on where the job's earlier attempts ended: tokens,
        text, logprobs and usage are those of an uninterrupted run, and events tell only what the
        journal does not. Choices that it shows complete are not run again. ``usage.cached`` and
        ``timings`` are this attempt's, from its own first step and first token; ``queue_ms`` and
        ``first_token_ms`` still count from ``queued_at``, the earlier attempts included.

        Args:
            queued_at: unix time in s at which the job was enqueued; ``deadline_s`` and
                ``queue_ms`` count from it, or from now.
            journal: what the job's event stream holds of earlier attempts.
            on_event: called on the engine's thread with every event; must not block. Where it
                raises, this generation is cancelled.

        Raises:
            ModelNotServed: the request names another model.
            ContextLengthExceeded: prompt and ``max_tokens`` do not fit.
            InvalidRequest: an id beyond the vocabulary, or a prompt without a token.
            InternalError: the engine is closed or broken, or the journal is not of this request.
        """
        check_model(request, self.model_name)
        prompt_ids = checked_prompt(
            request,
            self.tokenizer,
            vocab_size=self.config.vocab_size,
            max_context=self.max_context,
            pool_tokens=self.cache.blocks.total * self.cache.block_size,
        )
        job_id = job_id or str(uuid.uuid4())
        seed = job_seed(job_id) if request.seed is None else request.seed
        arrival = next(self._arrivals)
        sequences = tuple(
            Sequence(
                prompt_ids,
                request,
                seed=choice_seed(seed, choice),
                text=ChoiceText(self.tokenizer, request.stop),
                arrival=arrival,
                choice=choice,
                eos_ids=self._eos_ids,
            )
            for choice in range(request.n)
        )
        if journal:
            resume(sequences, journal, vocab_size=self.config.vocab_size)
        generation = Generation(
            job_id,
            request,
            sequences,
            model_name=self.model_name,
            worker=worker,
            attempt=attempt,
            queued_at=queued_at,
            on_event=on_event,
            request_cancel=self._thread.cancel,
        )
        self._thread.add(generation)
        return generation

    def logits(self, token_ids: Ids[int]) -> torch.Tensor:
        """The model's logits after each of ``token_ids``: [tokens, vocab] float32.

        Computed in one pass between two steps, with keys and values of its own that are gone
        afterwards. Raises ``InvalidRequest`` for no ids, unknown ids or more than the context.
        """
        ids = list(token_ids)
        faults = []
        if not 1 <= len(ids) <= self.max_context:
            rule = f"must be 1 to {self.max_context} tokens"
            faults.append(Fault(field="token_ids", rule=rule, got=f"{len(ids)} tokens"))
        if any(not 0 <= token_id < self.config.vocab_size for token_id in ids):
            rule = f"token ids must be below {self.config.vocab_size}, the vocabulary's size"
            faults.append(Fault(field="token_ids", rule=rule, got="an id beyond it"))
        if faults:
            raise InvalidRequest.from_faults(faults)
        return self._thread.call(lambda: uncached_logits(self._model, self.cache, ids))

    def stats(self) -> EngineStats:
        """The engine's figures, read without stopping it."""
        kv = self.cache.kv.keys
        counters = self._counters
        return EngineStats(
            model=self.model_name,
            device=str(kv.device),
            dtype=str(self.cache.kv.dtype).removeprefix("torch."),
            bytes={"weights": self._weight_bytes, **self.cache.bytes_by_part()},
            planned_bytes=self._planned_bytes,
            measured_bytes=self._measured_bytes,
            max_context=self.max_context,
            max_sequences=self.max_sequences,
            running=self._scheduler.running_count,
            waiting=self._scheduler.waiting_count,
            tokens_per_s=counters.tokens_per_s(),
            kv_blocks_total=self.cache.blocks.total,
            kv_blocks_free=self.cache.blocks.free_count,
            kv_blocks_kept=self.cache.blocks.kept_count,
            prompt_tokens_total=counters.prompt_tokens_total,
            cached_tokens_total=self._scheduler.blocks.found_tokens_total,
            prefix_hits_total=self._scheduler.blocks.hits_total,
            completion_tokens_total=counters.completion_tokens_total,
            finished_total=counters.finished_total,
            preempted_total=self._scheduler.preempted_total,
            steps_total=counters.steps_total,
        )

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread runs; False after :meth:`close` or a crash."""
        return self._thread.healthy

    def stalled_for_s(self) -> float:
        """Seconds without a sign of life while there is work; 0.0 while idle.

        Grows while a step, an event callback or a call hangs, and for good after a crash. For a
        watchdog: cheap, takes no lock.
        """
        return self._thread.heartbeat.stalled_for_s()

    def misplaced_tensors(self) -> tuple[str, ...]:
        """What of model and cache is not on the engine's device: ``blocks.0.mlp.down.weight on
        cpu``. Empty, always; a worker looks every minute all the same."""
        return tuple(
            f"{name} on {tensor.device}"
            for root, part in self._parts()
            for name, tensor in resident_tensors(part, root)
            if tensor.device != self._device
        )

    def measure_memory(self) -> None:
        """Notes what the engine really takes, for :meth:`stats`; call it once it has run warm."""
        measured = {part: storage_bytes(root) for part, root in self._parts()}
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            measured["workspace"] = max(0, peak - sum(measured.values()))
            measured["reserved"] = max(0, torch.cuda.max_memory_reserved(self._device) - peak)
        self._measured_bytes = measured

    def _warm_up(self, model: ForwardModel, max_step_tokens: int) -> None:
        """Before the first job, on the engine's own thread, whose libraries are to be warm."""
        self._thread.call(
            lambda: warm_up(
                model,
                self.cache,
                max_sequences=self.max_sequences,
                max_step_tokens=max_step_tokens,
            )
        )

    def _parts(self) -> tuple[tuple[str, object], ...]:
        cache = self.cache
        return (
            ("weights", self._weights),
            ("kv", cache.kv),
            ("rope", cache.rope),
            ("masks", cache.masks),
            ("decode", cache.decode),
        )

    def check_integrity(self) -> None:
        """Raises unless every KV block is free or held by who lists it. Meant for tests."""
        self._thread.call(self._scheduler.check_integrity)

    def close(self) -> None:
        """Cancels what still runs and ends the thread; a second call does nothing."""
        self._thread.close()

    def _token_text(self, token_id: int) -> str:
        # A model's output may have more rows than its vocabulary has tokens.
        known = token_id < self.tokenizer.vocab_size
        return self.tokenizer.token_text(token_id) if known else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
