"""Vectors and scores of texts from one encoder: many jobs share each forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import (
    AnyTextsRequest,
    EmbedRequest,
    ModelLoadFailed,
)
from llorch_worker.engine.device.queue import begin_thread, use_device
from llorch_worker.engine.interface import Attempt, EngineStats, ModelFacts
from llorch_worker.engine.loading import (
    load_weights,
    misplaced_tensors,
    part_of_load,
    resident_tensors,
)
from llorch_worker.engine.memory.compute_device import visible_cards
from llorch_worker.engine.memory.encoder_plan import EncoderPlan, asked_rule, plan_encoder
from llorch_worker.engine.stats import Counters
from llorch_worker.engine.texts_core import TextsCore
from llorch_worker.engine.texts_generation import TextsGeneration
from llorch_worker.engine.thread import EngineThread, Outlet, ThreadedEngine
from llorch_worker.engine_options import EngineOptions
from llorch_worker.intake.texts import PreparedTexts
from llorch_worker.kernels.openmp import cpu_threads, end_own_threads
from llorch_worker.model.encoder import Encoder, EncoderConfig, Texts
from llorch_worker.model.encoder.decoder import DecoderOfTexts, cache_of_texts, load_head
from llorch_worker.model.encoder.decoder_rule import asks_as_qwen3
from llorch_worker.processes.board import Board
from llorch_worker.settings import default_model_name
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.control_tokens import AroundTurns
from llorch_worker.weights import Checkpoint, fingerprint, open_checkpoint, select_linears


class EmbeddingEngine(ThreadedEngine):
    """One encoder on one device, shared by all jobs. Any thread may call any method; the engine's
    own thread alone computes.

    Its interface is that of :class:`.Engine`, for requests of texts.
    """

    def __init__(
        self,
        encoder: Encoder | DecoderOfTexts,
        tokenizer: Tokenizer,
        plan: EncoderPlan,
        *,
        model_name: str,
        fingerprint: str = "",
        num_threads: int | None = None,
        board: Board | None = None,
        outlet: Outlet | None = None,
    ) -> None:
        """Made by :meth:`load`."""
        options = plan.options
        self.tokenizer = tokenizer
        self.pooling = plan.pooling
        self.model_name = model_name
        self._encoder = encoder
        self._plan = plan
        self.facts = ModelFacts(
            model_name=model_name,
            fingerprint=fingerprint,
            arithmetic=f"{plan.device.type} {plan.kept_as}",
            max_context=plan.longest_context,
            max_sequences=options.sequences,
            vocab_size=plan.config.vocab_size,
            device=str(plan.device),
            card_uuids=visible_cards(plan.device),
            tasks=plan.tasks,
            width=1 if plan.pooling is None else plan.config.hidden_size,
            sizes=plan.sizes,
            scores_pairs=plan.pooling is None,
            asks_as_qwen3=plan.graph is not None and asks_as_qwen3(plan.checkpoint),
        )
        self._weight_bytes = sum(
            tensor.untyped_storage().nbytes() for _, tensor in resident_tensors(encoder)
        )
        self._board = board or Board(options.sequences)
        self._counters = Counters()
        self._core = TextsCore(
            self._compute,
            options.step_tokens,
            counters=self._counters,
            low_waits_at_most_s=options.low_waits_at_most_s,
            board=self._board,
        )
        self._thread = EngineThread(
            self._core,
            name=f"llorch-engine-{model_name}",
            begin=partial(begin_thread, plan.device, num_threads),
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
        around: Callable[[], AroundTurns] | None = None,
        board: Board | None = None,
        outlet: Outlet | None = None,
        checkpoint: Checkpoint | None = None,
        **changed: Any,
    ) -> Self:
        """An engine of a GGUF file, a folder or ``hf:...``; see :meth:`.Engine.load`.

        ``checkpoint``: the file, if it is open.

        Raises:
            ModelLoadFailed: the file is damaged or no encoder, or nobody says how it is pooled.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        options = replace(options or EngineOptions(), **changed)
        checkpoint = checkpoint or open_checkpoint(Path(path))
        plan = plan_encoder(checkpoint, options)
        if plan.misfit is not None:
            raise ModelLoadFailed(plan.misfit)
        device, weights_bytes = plan.device, plan.weights_bytes
        use_device(device)
        tokenizer = load_tokenizer(checkpoint)
        if plan.pooling is None and plan.graph is None:
            _check_pairs(checkpoint, tokenizer)
        if progress is not None:
            progress(0, weights_bytes)
        with part_of_load("the weights", device, weights_bytes):
            encoder = _load_encoder(plan, tokenizer)
        end_own_threads()
        if progress is not None:
            progress(weights_bytes, weights_bytes)
        if around is not None:
            around()  # which its sender sends of any model
        chosen = num_threads is None and device.type == "cpu"
        return cls(
            encoder,
            tokenizer,
            plan,
            model_name=model_name or default_model_name(Path(path)),
            fingerprint=fingerprint(checkpoint, asked_rule(checkpoint, options)),
            num_threads=cpu_threads(weights_bytes) if chosen else num_threads,
            board=board,
            outlet=outlet,
        )

    def _compute(self, texts: Texts) -> torch.Tensor:
        if self.pooling is None:
            return self._encoder.scores(texts)
        return self._encoder.vectors(texts, self.pooling)

    # The engine's interface --------------------------------------------------------------------

    def warm_up(self) -> None:
        """Computes a step of the longest texts."""
        self._thread.call(partial(self._core.warm_up, self._plan.longest_context))

    def submit(
        self, request: AnyTextsRequest | PreparedTexts, **attempt: Unpack[Attempt]
    ) -> TextsGeneration:
        """See :meth:`.Engine.submit`. Texts that the journal has are not computed again.

        Raises:
            ModelNotServed: the request names another model.
            InvalidRequest: it breaks a rule of this model, or asks for what it does not do.
            InternalError: the engine is closed or broken, or the journal is another request's.
        """
        return self._submit_texts(request, **attempt)

    def embed(self, texts: Sequence[str], **fields: Any) -> torch.Tensor:
        """The vectors of ``texts``: float32 ``[texts, dimensions]``. ``fields``: others of
        :class:`.EmbedRequest`.

        Raises what :meth:`submit` does.
        """
        generation = self.submit(EmbedRequest(input=texts, **fields))
        generation.result()
        return generation.values

    def stats(self) -> EngineStats:
        """The engine's figures, read without stopping it. It has no KV blocks."""
        held = {"weights": self._weight_bytes}
        core, counters = self._core, self._counters
        return EngineStats(
            model=self.model_name,
            device=self.facts.device,
            dtype=self._plan.kept_as,
            bytes=held,
            planned_bytes={**held, "workspace": self._plan.workspace_bytes},
            measured_bytes=held,
            max_context=self.facts.max_context,
            max_sequences=self.facts.max_sequences,
            running=core.running,
            waiting=0,
            tokens_per_s=core.rate.read(),
            prompt_tokens_total=counters.prompt_tokens_total,
            finished_total=counters.finished_total,
            steps_total=counters.steps_total,
        )

    def misplaced_tensors(self) -> tuple[str, ...]:
        """Tensors of the model that are not on the engine's device."""
        return misplaced_tensors({"weights": self._encoder}, self._plan.device)


def _load_encoder(plan: EncoderPlan, tokenizer: Tokenizer) -> Encoder | DecoderOfTexts:
    device, dtype, graph = plan.device, plan.dtype, plan.graph
    if graph is None:
        assert isinstance(plan.config, EncoderConfig)
        linears = select_linears(device, dtype, plan.options.kernels)
        return Encoder.load(plan.checkpoint, plan.config, linears, dtype=dtype, device=device)
    model = load_weights(graph)
    head = None
    if plan.head is not None:
        answers = yes_and_no(plan.checkpoint, tokenizer)
        head = load_head(plan.head, plan.checkpoint, model, answers)
    # Tables alone: it has no KV blocks.
    tables = UnifiedCache.allocate(graph.shape, 0)
    return DecoderOfTexts(model, cache_of_texts(tables, plan.cell_tokens), head)


def _check_pairs(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raises ModelLoadFailed if no pair can be written."""
    try:
        _ = tokenizer.between_texts
    except ValueError as error:
        raise ModelLoadFailed(
            f"The tokenizer of {checkpoint.path} cannot be used: {error}."
        ) from error


def yes_and_no(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens by which a model judges. Raises ModelLoadFailed if they are no single ones."""
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(each) != 1 for each in ids):
        raise ModelLoadFailed(
            f"{checkpoint.path}: yes and no are no single tokens of its vocabulary, so no score "
            "comes of them."
        )
    return ids[0][0], ids[1][0]
