"""The engine's parts as ranges in a torch profile.

The ranges are patched in from outside and removed afterwards, so they cost a worker nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import wraps
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch.profiler import record_function

from llorch_worker.engine.core import EngineCore
from llorch_worker.engine.runner import Runner
from llorch_worker.engine.sampling.sampler import Chosen, Sampler
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.model import RaggedBatch, Transformer
from llorch_worker.model.forward_pass import ForwardPass
from llorch_worker.weights import Linear

PREFIX: Final = "llorch: "
STEP: Final = PREFIX + "step"
FORWARD: Final = PREFIX + "forward pass of "
_ABSENT = object()

Namer = Callable[..., str | None]
"""Returns the name of a call's range from its arguments, ``self`` first; None for no range."""


class Component(StrEnum):
    """A part of the engine; the value is its name in tables."""

    QKV = "QKV projection"
    ROPE_AND_WRITE = "RoPE and KV write"
    ATTENTION = "attention"
    ATTENTION_OUTPUT = "attention's output projection"
    NORM = "RMS norm and residual"
    GATE_UP = "gate and up projection"
    SILU_AND_MUL = "SiLU and product"
    DOWN = "down projection"
    EMBEDDING = "embedding"
    OUTPUT_MATRIX = "output matrix"
    PREPARATION = "angles, indices and masks"
    BETWEEN = "between the model's parts"
    """Python between the parts, and the forward pass's own work."""
    BATCH = "laying out the batch"
    SAMPLER = "sampler"
    SCHEDULER = "scheduler"
    DELIVERY = "detokeniser and events"
    REST = "rest"
    """Time of a step outside all other components."""


def range_of(component: Component) -> str:
    """The name of a component's range."""
    return PREFIX + component


def forward_range(sequences: int, tokens: int) -> str:
    """The name of a forward pass's range, which distinguishes decode steps from others."""
    return f"{FORWARD}{sequences} sequences, {tokens} tokens"


class Ranges:
    """While entered, makes every call of a part of ``model`` and of any engine a range.

    Ranges nest: time in a part that another calls counts only for the inner part. On a card each
    range waits until the card has done its work, so that host and card do not overlap. Enter and
    leave this while the engine is idle.
    """

    def __init__(self, model: Transformer, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._plain: list[tuple[type, str, object]] = []

    def __enter__(self) -> Self:
        for owner, method, component in (
            (Runner, "launch", Component.BATCH),
            (Sampler, "prepare", Component.SAMPLER),
            (Sampler, "_choose", Component.SAMPLER),
            (Chosen, "read", Component.SAMPLER),
            (Scheduler, "schedule", Component.SCHEDULER),
            (Scheduler, "schedule_ahead", Component.SCHEDULER),
            (Scheduler, "advance", Component.SCHEDULER),
            (Scheduler, "finish", Component.SCHEDULER),
            (EngineCore, "_deliver", Component.DELIVERY),
            (ForwardPass, "__init__", Component.PREPARATION),
            *self._operations(),
        ):
            self._wrap(owner, method, range_of(component))
        self._wrap(EngineCore, "step", STEP)
        self._wrap(type(self._model), "forward", _forward_name)
        linears = {id(linear): component for linear, component in self._linears()}

        def linear_name(linear: Linear, *_: object) -> str | None:
            component = linears.get(id(linear))
            return None if component is None else range_of(component)

        for kind in {type(linear) for linear, _ in self._linears()}:
            self._wrap(kind, "__call__", linear_name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._plain:
            owner, method, plain = self._plain.pop()
            if plain is _ABSENT:
                delattr(owner, method)  # it was inherited
            else:
                setattr(owner, method, plain)

    def _operations(self) -> Iterator[tuple[type, str, Component]]:
        ops = type(self._model.ops)
        yield ops, "rms_norm", Component.NORM
        yield ops, "add_rms_norm", Component.NORM
        yield ops, "silu_and_mul", Component.SILU_AND_MUL
        yield ops, "gelu_and_mul", Component.SILU_AND_MUL
        yield ops, "rope_and_write", Component.ROPE_AND_WRITE
        # These prepare attention itself, of a type that the kernels choose.
        self._wrap_results(ops, "paged_decode")
        self._wrap_results(ops, "paged_prefill")

    def _linears(self) -> Iterator[tuple[Linear, Component]]:
        for block in self._model.blocks:
            yield block.attention.qkv, Component.QKV
            yield block.attention.output, Component.ATTENTION_OUTPUT
            yield block.mlp.gate_up, Component.GATE_UP
            yield block.mlp.down, Component.DOWN
        yield self._model.output, Component.OUTPUT_MATRIX

    def _wrap_results(self, owner: type, method: str) -> None:
        plain = getattr(owner, method)

        @wraps(plain)
        def prepare(*args: Any, **options: Any) -> Any:
            prepared = plain(*args, **options)
            kind = type(prepared)
            if not any(kind is wrapped for wrapped, _, _ in self._plain):
                self._wrap(kind, "__call__", range_of(Component.ATTENTION))
            return prepared

        self._replace(owner, method, prepare)

    def _wrap(self, owner: type, method: str, name: str | Namer) -> None:
        plain = getattr(owner, method)
        synchronises = self._device.type == "cuda"

        @wraps(plain)
        def ranged(*args: Any, **options: Any) -> Any:
            title = name if isinstance(name, str) else name(*args)
            if title is None:
                return plain(*args, **options)
            with record_function(title):
                result = plain(*args, **options)
                if synchronises:
                    torch.cuda.synchronize(self._device)
            return result

        self._replace(owner, method, ranged)

    def _replace(self, owner: type, method: str, by: Callable[..., Any]) -> None:
        found = vars(owner).get(method, _ABSENT)
        self._plain.append((owner, method, found))
        setattr(owner, method, staticmethod(by) if isinstance(found, staticmethod) else by)


def _forward_name(_model: Transformer, batch: RaggedBatch, *_: object) -> str:
    return forward_range(len(batch.query_lengths), len(batch.token_ids))
