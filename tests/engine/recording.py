"""A CUDA graph for any device: replays operations with their arguments, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Recorder:
    """A ``Recorder`` that replays torch's operations: each again, into the memory it wrote then.

    As in a graph, host values are those of the recording, and Python does not run again.
    """

    def __init__(self) -> None:
        self.replayed = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        (replay,) = self.record_pieces(lambda _: run())
        return replay

    def record_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        pieces: list[_Operations] = []

        def begin() -> None:
            pieces.append(_Operations())
            pieces[-1].__enter__()

        def end() -> None:
            pieces[-1].__exit__(None, None, None)

        def cut() -> None:
            end()
            begin()

        begin()
        run(cut)
        end()
        return [partial(self._replay, piece) for piece in pieces]

    def _replay(self, operations: _Operations) -> None:
        self.replayed += 1
        operations.replay()

    def begin_anew(self) -> None:
        pass


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._list: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._list.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self._list:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
