"""The plan of an encoder's load: what it makes, how it is kept and its memory, decided before any
weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import psutil
import torch

from llorch_worker.contract import EmbedRequest, ModelLoadFailed, RerankRequest, ScoreRequest
from llorch_worker.contract.errors import InvalidLoadOption
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.engine.memory.compute_device import (
    check_kernels,
    free_bytes,
    resolve_device,
    resolve_dtype,
)
from llorch_worker.engine.memory.load_plan import vocabulary_bytes
from llorch_worker.engine_options import EngineOptions
from llorch_worker.model.encoder import EncoderConfig, Pooling, resolve_encoder
from llorch_worker.model.encoder.config import is_encoder
from llorch_worker.weights import Checkpoint
from llorch_worker.weights.contents import stored_numbers


@dataclass(frozen=True)
class EncoderPlan:
    """The decisions of :func:`plan_encoder`."""

    checkpoint: Checkpoint
    config: EncoderConfig
    pooling: Pooling | None
    """None for a model whose head scores pairs."""
    device: torch.device
    dtype: torch.dtype
    options: EngineOptions
    process_bytes: int
    """Memory of Python and its libraries before the load; 0 on a card."""
    free_bytes: int
    """Free on the device before the load."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those that the model does."""
        scores = (RerankRequest.task, ScoreRequest.task)
        return scores if self.pooling is None else (EmbedRequest.task, *scores)

    @property
    def longest_context(self) -> int:
        """The most tokens of a text."""
        return self.config.longest_text

    @property
    def kept_as(self) -> str:
        """The type in memory."""
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def weights_bytes(self) -> int:
        """At most: matrices of a quantised file may stay in fewer bits."""
        return stored_numbers(self.checkpoint) * self.dtype.itemsize

    @property
    def workspace_bytes(self) -> int:
        """What a step takes: a few rows of numbers for each token."""
        tokens = max(self.options.step_tokens, self.config.longest_text)
        numbers = 8 * self.config.hidden_size + 3 * self.config.intermediate_size
        return tokens * numbers * self.dtype.itemsize

    @property
    def vocabulary_bytes(self) -> int:
        """0 on a card."""
        if self.device.type != "cpu":
            return 0
        return vocabulary_bytes(self.checkpoint, self.config.vocab_size)

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


def plan_encoder(
    checkpoint: Checkpoint, options: EngineOptions, pooling: Pooling | None = None
) -> EncoderPlan:
    """The plan for a load with these options. ``pooling`` goes before the rule of the files.

    Raises:
        InvalidLoadOption: an option is out of its range.
        ModelLoadFailed: the file is no encoder, is not done here, or nobody says how vectors are
            made of its tokens.
    """
    if not is_encoder(checkpoint):
        raise ModelLoadFailed(
            f"{checkpoint.path} is no encoder; vectors need a model of the family bert."
        )
    device = resolve_device(options.device)
    check_kernels(options.kernels, device)
    config = _within(resolve_encoder(checkpoint), options)
    pooling = pooling or config.pooling
    if pooling is None and not config.labels:
        raise ModelLoadFailed(
            f"{checkpoint.path} does not say how vectors are made of its tokens; name a "
            "pooling: mean, cls or last."
        )
    parameters = stored_numbers(checkpoint)
    return EncoderPlan(
        checkpoint=checkpoint,
        config=config,
        pooling=None if config.labels else pooling,
        device=device,
        dtype=resolve_dtype(options.dtype, device, parameters=parameters, kernels=options.kernels),
        options=next(iter(options.sized_for(device.type))),
        process_bytes=psutil.Process().memory_info().rss if device.type == "cpu" else 0,
        free_bytes=free_bytes(device, options.memory_bytes),
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
