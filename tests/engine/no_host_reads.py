"""Stands in for a card at the launch of a step: refuses what would make the host wait for it, and
counts the memory that it takes."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from llorch_worker.cache import UnifiedCache
from llorch_worker.engine.device.queue import Done, Forward, Pending
from llorch_worker.engine.runner import Runner, Step
from llorch_worker.engine.sampling.masks import Masker
from llorch_worker.engine.step_plan import StepPlan
from llorch_worker.model import RaggedBatch, Transformer

_aten = torch.ops.aten
_WAITING = {
    _aten._local_scalar_dense,  # item, bool, float
    _aten.bincount,
    _aten.masked_select,
    _aten.nonzero,
    _aten._unique2,
}
_READING = ("tolist", "numpy", "item", "cpu", "__bool__", "__float__", "__int__")
_UPLOADS = {("kernels/upload.py", "on_device"), ("engine/runner.py", "upload")}
"""They copy from pinned memory, for which the host does not wait."""


class NoHostReads(TorchDispatchMode):
    """Refuses operations that read numbers of the device, or copy from memory that is not pinned,
    as long as it is entered."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet = func.overloadpacket
        assert packet not in _WAITING, f"{func} waits for the device"
        if packet in (_aten.index, _aten.index_put_, _aten.index_put):
            kinds = {index.dtype for index in args[1] if index is not None}
            assert torch.bool not in kinds, "an index of booleans waits for the device"
        # Numbers of the host, but for a single one, which needs no copy.
        if packet is _aten.lift_fresh and args[0].dim():
            assert _in_upload(), "numbers of the host are copied from memory that is not pinned"
        return func(*args, **(kwargs or {}))


def _in_upload() -> bool:
    frame = sys._getframe(2)
    for _ in range(6):
        code = frame.f_code
        if any(code.co_filename.endswith(f) and code.co_name == name for f, name in _UPLOADS):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Refuses what would make the host wait, in this thread."""
    here = threading.get_ident()

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*arguments: Any) -> Any:
            assert threading.get_ident() != here, f"{name} reads numbers of the device"
            return _PLAIN[name](*arguments)

        return refused

    def pinned(array: Any) -> torch.Tensor:
        if threading.get_ident() == here:
            assert _in_upload(), "an array of the host is copied from memory that is not pinned"
        return from_numpy(array)

    from_numpy = torch.from_numpy
    with pytest.MonkeyPatch.context() as patch, NoHostReads():
        for name in _READING:
            patch.setattr(torch.Tensor, name, refuse(name))
        patch.setattr(torch, "from_numpy", pinned)
        yield


class AtOnce:
    """A queue that computes at the launch, and for which steps are launched ahead."""

    overlaps = True

    def launch(self, forward: Forward) -> Pending:
        return Done(forward())


class FreeForward:
    """A model that may read what it likes: the kernels of a card are not those of this machine."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        with _disable_current_modes(), pytest.MonkeyPatch.context() as patch:
            for name, method in _PLAIN.items():
                patch.setattr(torch.Tensor, name, method)
            return self.model.forward(batch, cache)


_PLAIN = {name: getattr(torch.Tensor, name) for name in _READING}


def launch_without_host_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no step may read from the device, or make the host wait, before it is read.
    Masks are applied as on a card."""
    for name in ("launch", "sample"):
        monkeypatch.setattr(Runner, name, _guarded(getattr(Runner, name)))
    begin = Masker.__init__

    def as_on_a_card(masker: Masker, *arguments: Any) -> None:
        begin(masker, *arguments)
        masker._on_cpu = False

    monkeypatch.setattr(Masker, "__init__", as_on_a_card)


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*arguments: Any, **options: Any) -> Any:
        with no_host_reads():
            return method(*arguments, **options)

    return guarded


class DeviceMemory(TorchDispatchMode):
    """An allocator as a card's: a block that a tensor has left serves the next of its size.

    It sees what operations allocate while it is entered. Only for a block of a size that none has
    left must it ask the card, which may make the host wait.
    """

    ROUNDED_BYTES = 512

    def __init__(self) -> None:
        super().__init__()
        self._left: Counter[int] = Counter()
        self._used: set[int] = set()
        self.asked: list[str] = []
        """The operations for which it had to ask the card."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if _is_tensor(each)
        }
        for tensor in filter(_is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if id(storage) not in self._used | given:
                self._take(storage, str(func))
        return result

    def _take(self, storage: torch.UntypedStorage, what: str) -> None:
        size = -(-storage.nbytes() // self.ROUNDED_BYTES)
        if self._left[size]:
            self._left[size] -= 1
        elif size:
            self.asked.append(what)
        self._used.add(id(storage))
        weakref.finalize(storage, self._leave, id(storage), size)

    def _leave(self, storage: int, size: int) -> None:
        self._used.discard(storage)
        self._left[size] += 1


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


SETTLED_STEPS = 4
"""Two steps are on the device at once, and each is kept until the next but one is launched."""


def watch_memory(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Fills in for each launch of a step how many steps before it had the same sequences, a token
    each, and for what the step before it had to ask the card."""
    memory, launches = DeviceMemory(), list[tuple[int, list[str]]]()
    launch, sample = Runner.launch, Runner.sample
    before: list[Any] = []

    def watched_launch(runner: Runner, plan: StepPlan, after: Step | None = None) -> Step:
        company = [chunk.sequence for chunk in plan.chunks if chunk.rows == 1]
        same = company == before and len(company) == len(plan.chunks)
        before[:] = company
        launches.append((launches[-1][0] + 1 if same and launches else 0, memory.asked))
        memory.asked = []
        with memory:
            return launch(runner, plan, after)

    def watched_sample(runner: Runner, step: Step) -> None:
        with memory:
            sample(runner, step)

    monkeypatch.setattr(Runner, "launch", watched_launch)
    monkeypatch.setattr(Runner, "sample", watched_sample)
    return launches
