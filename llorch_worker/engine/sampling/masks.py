"""The masks of a step: which tokens each constrained row may take."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.intake.constraints.matcher import Bits, Matcher
from llorch_worker.kernels.upload import on_device

Ids = npt.NDArray[np.intp]
Highest = npt.NDArray[np.float32]

# The highest values that a byte of a mask leaves to the logits of its eight ids: [256, 8].
_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_HIGHEST = np.where(_BYTES, np.inf, -np.inf).astype(np.float32)
_FEW = 1 / 32
"""The share of forbidden ids up to which they are written one by one."""


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A ``row`` of the batch and what decides its mask; see :meth:`Matcher.finish_row`."""

    row: int
    matcher: Matcher
    stop_ids: frozenset[int]
    may_stop: bool


class Masks(Protocol):
    """The masks of some rows of a batch."""

    def apply(self, logits: torch.Tensor) -> None:
        """Sets the logits of forbidden tokens to -inf; ``logits``: [rows, vocab] float32."""
        ...


@dataclass(frozen=True, slots=True)
class _MaskBits:
    """Masks for a card: ``bits`` [masked, bytes] uint8, pinned."""

    rows: list[int]
    bits: torch.Tensor

    def apply(self, logits: torch.Tensor) -> None:
        bits = self.bits.to(logits.device, non_blocking=True)
        added = _added(logits.device)[bits.int()].flatten(1)[:, : logits.shape[1]]
        logits.index_add_(0, on_device(self.rows, torch.int64, logits.device), added)


@cache
def _added(device: torch.device) -> torch.Tensor:
    """What a byte of a mask adds to the logits of its eight ids: [256, 8] float32, 0 or -inf."""
    return on_device(np.minimum(_HIGHEST, 0), torch.float32, device)


@dataclass(frozen=True, slots=True)
class _MaskedLines:
    """Masks for a CPU: of each row the ids that are forbidden if they are few, else the highest
    value that each logit may have, [vocab] float32.

    Within a string nearly all tokens are allowed: to write the others alone moves a fraction of the
    memory that a mask of every id does. ``minimum`` is many times as fast as a fill by a mask.
    """

    rows: list[tuple[int, Ids | Highest]]

    def apply(self, logits: torch.Tensor) -> None:
        table = logits.numpy()
        for row, mask in self.rows:
            line = table[row]
            if mask.dtype == np.intp:
                line[mask] = -np.inf
            else:
                np.minimum(line, mask, out=line)


class Masker:
    """Fills in masks in a thread of its own, by all cores and without Python's lock.

    Only one step at a time may have masks: the next one's depend on its tokens.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        self._vocab_size = vocab_size
        # One more id for the end, as in ConstraintVocabulary.
        self._words = vocab_size // 32 + 1
        self._on_cpu, self._pinned = device.type == "cpu", device.type == "cuda"
        self._fill_bits = partial(fill_next_token_bitmask_par, LLExecutor())
        self._thread = ThreadPoolExecutor(1, "llorch-masks")
        # [most rows so far, bytes of a mask, 8]; reused to avoid the page faults of new memory.
        self._highest = np.empty((0, self._words * 4, 8), np.float32)

    def begin(self, rows: Rows[MaskedRow]) -> Future[Masks]:
        """Starts to fill in the masks of ``rows``. Until it ends their matchers must not move, and
        until its masks are applied no other may begin."""
        return self._thread.submit(self._fill, rows)

    def _fill(self, rows: Rows[MaskedRow]) -> Masks:
        shape = (len(rows), self._words)
        masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._pinned)
        bits = masks.numpy()
        free = [(r.matcher.ll_matcher, i) for i, r in enumerate(rows) if not r.matcher.forced]
        if free:
            self._fill_bits(free, bits)
        for row, mask in zip(rows, bits, strict=True):
            row.matcher.finish_row(mask, row.stop_ids, row.may_stop)
        if not self._on_cpu:
            return _MaskBits([row.row for row in rows], masks.view(torch.uint8))
        if len(rows) > len(self._highest):
            self._highest = np.empty((len(rows), *self._highest.shape[1:]), np.float32)
        return _MaskedLines([(row.row, self._line(i, bits[i])) for i, row in enumerate(rows)])

    def _line(self, index: int, bits: Bits) -> Ids | Highest:
        mask = bits.view(np.uint8)
        allowed = np.unpackbits(mask, count=self._vocab_size, bitorder="little")
        if self._vocab_size - np.count_nonzero(allowed) <= self._vocab_size * _FEW:
            return np.flatnonzero(allowed == 0)
        highest: Highest = self._highest[index]
        np.take(_HIGHEST, mask, axis=0, out=highest, mode="clip")
        return highest.ravel()[: self._vocab_size]
