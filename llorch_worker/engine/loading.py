"""Loads weights and cache onto the device, as planned."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from llorch_worker.cache import CacheShape, UnifiedCache
from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.engine.device.graphs import (
    CudaRecorder,
    DecodeGraphs,
    Recorder,
    bucket_sizes,
)
from llorch_worker.engine.device.pieces import RecordedPieces, piece_sizes
from llorch_worker.engine.device.step_errors import is_out_of_memory
from llorch_worker.engine.memory.compute_device import free_bytes
from llorch_worker.engine.memory.load_plan import LoadPlan
from llorch_worker.kernels import end_own_threads
from llorch_worker.model import ForwardModel, Transformer

logger = logging.getLogger(__name__)

_OURS = __name__.partition(".")[0]


@dataclass(frozen=True)
class LoadedModel:
    """The parts that a load puts on the device."""

    model: Transformer
    cache: UnifiedCache
    steps: ForwardModel
    """``model``, or a wrapper that replays its recorded decode steps."""
    arithmetic: str = ""
    """See ``LoadPlan.arithmetic``."""
    workspace_bytes: int = 0
    """What the plan gives to the steps."""

    def parts(self) -> dict[str, object]:
        """What keeps tensors on the device, by name."""
        return {"weights": self.model, **self.cache.parts()}

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of :meth:`parts`."""
        cache = UnifiedCache.required_bytes(self.cache.shape, self.cache.blocks.total)
        return {"weights": self.model.weight_bytes, **cache}

    def measured_bytes(self) -> dict[str, int]:
        """Bytes of the tensors of :meth:`parts`; views of the same memory count once. On a card
        also ``workspace``, the peak of the steps, and ``reserved``, the memory that torch's
        allocator holds beyond that."""
        measured = {}
        for name, part in self.parts().items():
            storages = (tensor.untyped_storage() for _, tensor in resident_tensors(part))
            sizes = {(each.device, each.data_ptr()): each.nbytes() for each in storages}
            measured[name] = sum(sizes.values())
        device = self.cache.shape.device
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            measured["workspace"] = max(0, peak - sum(measured.values()))
            measured["reserved"] = max(0, torch.cuda.max_memory_reserved(device) - peak)
        return measured

    def misplaced_tensors(self) -> tuple[str, ...]:
        """The tensors of :meth:`parts` that are not on the cache's device: ``rope.cos on cpu``."""
        return misplaced_tensors(self.parts(), self.cache.shape.device)


def load_as_planned(
    plan: LoadPlan, progress: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Loads the weights and allocates the cache, with fewer KV blocks than planned if less memory
    is free.

    Raises ``ModelLoadFailed`` if memory does not suffice or the weights are damaged.
    """
    device = plan.device
    model = load_weights(plan, progress)
    # The caller has loaded the tokenizer: what is free now is free beside it.
    free = free_bytes(device)
    if (most := plan.options.memory_bytes) is not None:
        free = min(free, most - plan.weights_bytes - plan.vocabulary_bytes)
    recorder: Recorder | None = None
    if plan.shape.decode_rows:
        with part_of_load("a recorded step", device, plan.recorded_bytes):
            recorder = CudaRecorder(device)
            taken = measured_recorded_bytes(
                model, plan.shape, recorder, partial(free_bytes, device)
            )
        logger.info("recorded steps take %s", human_bytes(taken))
        plan = plan.with_recorded(taken)
    fitted = plan.fitted_to(free).require_fit()
    if fitted.num_blocks < plan.num_blocks:
        logger.info("%d of %d planned KV blocks fit", fitted.num_blocks, plan.num_blocks)
    with part_of_load("the cache", device, sum(fitted.cache_bytes.values())):
        cache = UnifiedCache.allocate(fitted.shape, fitted.num_blocks)
    if device.type == "cuda":
        # A load may use more memory than any step.
        torch.cuda.reset_peak_memory_stats(device)
    with part_of_load("a step", device, plan.workspace_bytes):
        loaded = LoadedModel(
            model,
            cache,
            model if recorder is None else recorded(model, cache, recorder),
            arithmetic=plan.arithmetic,
            workspace_bytes=plan.workspace_bytes,
        )
    # From here on the engine's thread computes; a second pool of threads would compete with it.
    end_own_threads()
    return loaded


def load_weights(plan: LoadPlan, progress: Callable[[int, int], None] | None = None) -> Transformer:
    """The weights as planned. Raises ``ModelLoadFailed``."""
    ops = plan.kernels.ops
    logger.info(
        "kernels: %s for %s on %s: %s", ops.name, plan.dtype, plan.device, plan.kernels.reason
    )
    with part_of_load("the weights", plan.device, plan.weights_bytes):
        return Transformer.load(
            plan.checkpoint,
            plan.config,
            dtype=plan.dtype,
            device=plan.device,
            linears=plan.linears,
            ops=ops,
            progress=progress,
        )


def measured_recorded_bytes(
    model: Transformer, shape: CacheShape, recorder: Recorder, free: Callable[[], int]
) -> int:
    """What the recordings of all sizes take on the device, and the libraries that they need.

    Measured by the memory that is ``free`` around two of each kind, the largest and one more,
    because all share one pool. They use a cache of one block, and are gone afterwards.
    """
    cache = UnifiedCache.allocate(shape, 1)
    weighed = _Weighed(recorder, free)
    total = 0
    kept: list[ForwardModel] = []
    for kind, sizes in (
        (RecordedPieces, piece_sizes(shape.max_step_tokens)),
        (DecodeGraphs, bucket_sizes(shape.decode_rows)),
    ):
        weighed.left_bytes = [free()]
        kept.append(kind(model, cache, weighed, sizes[-2:]))
        first, *others = (max(0, a - b) for a, b in pairwise(weighed.left_bytes))
        total += first + sum(others) * (len(sizes) - 1)
    recorder.begin_anew()
    return total


class _Weighed:
    """A recorder that notes what is free after each recording."""

    def __init__(self, recorder: Recorder, free: Callable[[], int]) -> None:
        self._recorder = recorder
        self._free = free
        self.left_bytes: list[int] = []

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See ``Recorder``."""
        replay = self._recorder.record(run)
        self.left_bytes.append(self._free())
        return replay

    def record_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        """See ``Recorder``."""
        pieces = self._recorder.record_pieces(run)
        self.left_bytes.append(self._free())
        return pieces

    def begin_anew(self) -> None:
        """See ``Recorder``."""
        self._recorder.begin_anew()


def recorded(model: Transformer, cache: UnifiedCache, recorder: Recorder) -> ForwardModel:
    """``model`` with its decode steps recorded, and those of mixed lengths but for attention."""
    pieces = RecordedPieces(model, cache, recorder, piece_sizes(cache.shape.max_step_tokens))
    return DecodeGraphs(model, cache, recorder, others=pieces)


@contextmanager
def part_of_load(what: str, device: torch.device, planned_bytes: int) -> Iterator[None]:
    """Runs a part of a load that is planned to take ``planned_bytes`` on ``device``.

    Raises:
        ModelLoadFailed: memory ran out, or Triton found no compiler.
    """
    free = free_bytes(device)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise ModelLoadFailed(
                f"memory ran out on {device} for {what}: {human_bytes(planned_bytes)} was planned "
                f"and {human_bytes(free)} was free; lower max_sequences, max_step_tokens or "
                "max_context, or free memory"
            ) from error
        if is_compiler_missing(error):
            raise ModelLoadFailed(
                "Triton could not compile the launcher of its kernels; install gcc and Python's "
                "headers (python3-dev), or set kernels to torch"
            ) from error
        raise


def is_compiler_missing(error: BaseException) -> bool:
    """Whether Triton found no C compiler, or the compiler failed, as it does without Python.h."""
    if isinstance(error, subprocess.CalledProcessError):
        return "-shared" in error.cmd
    return isinstance(error, RuntimeError) and "Failed to find C compiler" in str(error)


def misplaced_tensors(parts: Mapping[str, object], device: torch.device) -> tuple[str, ...]:
    """The tensors of ``parts`` that are not on ``device``, by name."""
    return tuple(
        f"{name} on {tensor.device}"
        for root, part in parts.items()
        for name, tensor in resident_tensors(part, root)
        if tensor.device != device
    )


def resident_tensors(root: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors below ``root``, each once, with the attributes that lead to it.

    Walks objects of this package and plain containers. It needs no help from the layers, so it
    finds the tensors of a new kind of layer too.
    """
    seen: set[int] = set()

    def walk(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        if id(value) in seen:
            return
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            yield path, value
            return
        # The root may be of any class, such as a wrapper around the model.
        children = _children(value, any_class=value is root)
        if children:
            seen.add(id(value))
            for key, child in children:
                yield from walk(child, f"{path}.{key}" if path else key)

    yield from walk(root, name)


def _children(value: Any, *, any_class: bool) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(str(index), child) for index, child in enumerate(value)]
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if not any_class and type(value).__module__.partition(".")[0] != _OURS:
        return []
    found = dict(getattr(value, "__dict__", {}))
    if is_dataclass(value):
        found |= {field.name: getattr(value, field.name) for field in fields(value)}
    for cls in type(value).__mro__:
        for slot in getattr(cls, "__slots__", ()):
            if hasattr(value, slot):
                found[slot] = getattr(value, slot)
    return list(found.items())
