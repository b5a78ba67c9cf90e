"""The plan of an encoder's load: what it makes, how it is kept and its memory, decided before any
weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import psutil
import torch

from llorch_worker.cache import PagedKV, UnifiedCache
from llorch_worker.contract import EmbedRequest, ModelLoadFailed, RerankRequest, ScoreRequest
from llorch_worker.contract.errors import InvalidLoadOption
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.engine.memory.compute_device import (
    check_kernels,
    free_bytes,
    resolve_device,
    resolve_dtype,
)
from llorch_worker.engine.memory.load_plan import (
    LoadPlan,
    plan_graph,
    plan_load,
    vocabulary_bytes,
)
from llorch_worker.engine.memory.workspace import workspace_bytes
from llorch_worker.engine_options import EngineOptions, PoolingChoice
from llorch_worker.model import ModelConfig, resolve_config
from llorch_worker.model.encoder import EncoderConfig, Pooling, resolve_encoder
from llorch_worker.model.encoder.config import is_encoder, longest_of_folder
from llorch_worker.model.encoder.decoder_rule import HeadKind, own_rule, rule_of
from llorch_worker.model.encoder.pooling import sizes_of
from llorch_worker.weights import Checkpoint
from llorch_worker.weights.contents import stored_numbers


@dataclass(frozen=True)
class EncoderPlan:
    """The decisions of :func:`plan_encoder`."""

    checkpoint: Checkpoint
    config: EncoderConfig | ModelConfig
    longest_context: int
    """The most tokens of a text."""
    pooling: Pooling | None
    """None for a model whose head scores pairs."""
    device: torch.device
    dtype: torch.dtype
    options: EngineOptions
    process_bytes: int
    """Memory of Python and its libraries before the load; 0 on a card."""
    free_bytes: int
    """Free on the device before the load."""
    graph: LoadPlan | None = None
    """How a decoder is kept; None of an encoder."""
    head: HeadKind | None = None
    """Of a decoder that scores."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those that the model does."""
        scores = (RerankRequest.task, ScoreRequest.task)
        return scores if self.pooling is None else (EmbedRequest.task, *scores)

    @property
    def kept_as(self) -> str:
        """The type in memory."""
        return str(self.dtype).removeprefix("torch.") if self.graph is None else self.graph.kept_as

    @property
    def sizes(self) -> tuple[int, ...]:
        """See :func:`.sizes_of`."""
        return sizes_of(self.checkpoint, self.config.hidden_size)

    @cached_property
    def weights_bytes(self) -> int:
        """At most: matrices of a quantised file may stay in fewer bits."""
        if self.graph is not None:
            return self.graph.weights_bytes
        return stored_numbers(self.checkpoint) * self.dtype.itemsize

    @property
    def workspace_bytes(self) -> int:
        """What a step takes: a few rows of numbers for each token, and a decoder's cells and
        tables."""
        tokens = self.step_tokens
        if self.graph is not None:
            shape = self.graph.shape
            cells = PagedKV.slot_bytes(shape, 1)["kv"] * self.cell_tokens
            tables = sum(UnifiedCache.required_bytes(shape, 0).values())
            sizes = {"max_sequences": 1, "max_step_tokens": tokens}
            step = workspace_bytes(self.graph.config, shape, self.graph.kernels.ops, **sizes)
            return step + cells + tables
        numbers = 8 * self.config.hidden_size + 3 * self.config.intermediate_size
        return tokens * numbers * self.dtype.itemsize

    @property
    def step_tokens(self) -> int:
        """The most of a step: of several texts, or of one that is longer."""
        return max(self.options.step_tokens, self.longest_context)

    @property
    def cell_tokens(self) -> int:
        """For how many tokens a decoder has cells; a text may be longer than a step."""
        return max(self.options.cell_tokens, self.longest_context)

    @cached_property
    def vocabulary_bytes(self) -> int:
        """0 on a card."""
        if self.device.type != "cpu":
            return 0
        return vocabulary_bytes(self.checkpoint, self.config.vocab_size, generates=False)

    @property
    def total_bytes(self) -> int:
        """All bytes that the process will hold on the device."""
        held = self.weights_bytes + self.workspace_bytes + self.vocabulary_bytes
        return held + self.process_bytes

    @property
    def misfit(self) -> str | None:
        """Why the model does not fit."""
        needed = self.total_bytes - self.process_bytes
        if needed <= self.free_bytes:
            return None
        return (
            f"the model needs {human_bytes(needed)} on {self.device}, but only "
            f"{human_bytes(self.free_bytes)} is free; use a smaller dtype or model, or free memory"
        )


def is_for_texts(checkpoint: Checkpoint, options: EngineOptions) -> bool:
    """Whether the model makes vectors or scores alone: an encoder, or a decoder whose files say
    what is made of its states, or that is to rank.

    Raises ModelLoadFailed if they say what is not done here.
    """
    return is_encoder(checkpoint) or options.pooling == "rank" or own_rule(checkpoint) is not None


def plan_of(checkpoint: Checkpoint, options: EngineOptions) -> LoadPlan | EncoderPlan:
    """The plan for the engine that the model needs. Raises what :func:`plan_encoder` and
    :func:`.plan_load` do."""
    if is_for_texts(checkpoint, options):
        return plan_encoder(checkpoint, options)
    return plan_load(checkpoint.path, options, checkpoint)


def asked_rule(checkpoint: Checkpoint, options: EngineOptions) -> str:
    """The ``pooling`` of the options if it decides what is made of a text; empty if the files do.

    Raises ModelLoadFailed if they say what is not done here.
    """
    if options.pooling is None:
        return ""
    if is_encoder(checkpoint):
        config = resolve_encoder(checkpoint)
        named = config.labels > 0 or config.pooling is not None
    else:
        named = own_rule(checkpoint) is not None
    return "" if named else options.pooling


def plan_encoder(checkpoint: Checkpoint, options: EngineOptions) -> EncoderPlan:
    """The plan for a load with these options. Their ``pooling`` is for files that name no rule.

    Raises:
        InvalidLoadOption: an option is out of its range.
        ModelLoadFailed: the file is not done here, or nobody says how vectors are made of its
            tokens.
    """
    if not is_encoder(checkpoint):
        return _plan_decoder(checkpoint, options)
    device = resolve_device(options.device)
    check_kernels(options.kernels, device)
    config = _within(resolve_encoder(checkpoint), options)
    pooling = config.pooling
    if config.labels:
        pooling = None
        _check_agrees(checkpoint, "rank", options)
    elif pooling is not None:
        _check_agrees(checkpoint, pooling.kind, options)
    elif options.pooling is None or options.pooling == "rank":
        raise _no_rule(checkpoint)
    else:
        pooling = Pooling(options.pooling)
    parameters = stored_numbers(checkpoint)
    return EncoderPlan(
        checkpoint=checkpoint,
        config=config,
        longest_context=config.longest_text,
        pooling=pooling,
        device=device,
        dtype=resolve_dtype(options.dtype, device, parameters=parameters, kernels=options.kernels),
        options=next(iter(options.sized_for(device.type))),
        process_bytes=psutil.Process().memory_info().rss if device.type == "cpu" else 0,
        free_bytes=free_bytes(device, options.memory_bytes),
    )


def _plan_decoder(checkpoint: Checkpoint, options: EngineOptions) -> EncoderPlan:
    rule = rule_of(checkpoint, options.pooling)
    if rule is None:
        raise _no_rule(checkpoint)
    _check_agrees(checkpoint, "rank" if rule.pooling is None else rule.pooling.kind, options)
    if options.max_context is None and (longest := longest_of_folder(checkpoint)) is not None:
        own = resolve_config(checkpoint, generates=False).max_context
        options = replace(options, max_context=min(longest, own))
    graph = plan_graph(checkpoint, options)
    return EncoderPlan(
        checkpoint=checkpoint,
        config=graph.config,
        longest_context=graph.shape.max_context,
        pooling=rule.pooling,
        device=graph.device,
        dtype=graph.dtype,
        options=graph.options,
        process_bytes=graph.process_bytes,
        free_bytes=graph.free_bytes,
        graph=graph,
        head=rule.head,
    )


def _check_agrees(checkpoint: Checkpoint, said: PoolingChoice, options: EngineOptions) -> None:
    """Raises InvalidLoadOption if the options want another rule than the files say."""
    if options.pooling not in (None, said):
        raise InvalidLoadOption(
            f"pooling is {options.pooling}, but {checkpoint.path} says {said}; unset LLORCH_POOLING"
        )


def _no_rule(checkpoint: Checkpoint) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{checkpoint.path} does not say how vectors are made of its tokens; set LLORCH_POOLING to "
        "mean, cls or last."
    )


def _within(config: EncoderConfig, options: EngineOptions) -> EncoderConfig:
    """``config`` with the ``max_context`` of the options."""
    asked, longest = options.max_context, config.longest_text
    if asked is None:
        return config
    if not 1 <= asked <= longest:
        raise InvalidLoadOption(
            f"max_context must be at most {longest}, the model's own context, and at least 1 "
            f"(got {asked})"
        )
    return replace(config, longest_text=asked)
