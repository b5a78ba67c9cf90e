"""The masks of a step: which tokens each constrained row may take."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from llorch_worker.engine.constraints.matcher import Bits, Matcher

# What a byte of a mask adds to the logits of its eight ids: [256, 8] float32, 0 or -inf.
_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_ADDED = np.where(np.unpackbits(_BYTES, axis=1, bitorder="little"), 0, -np.inf).astype(np.float32)


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A ``row`` of the batch and what decides its mask; see :meth:`Matcher.finish_row`."""

    row: int
    matcher: Matcher
    stop_ids: frozenset[int]
    may_stop: bool


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of the ``rows`` of a batch: ``bits`` [masked, bytes] uint8, and on a CPU what they add
    to the logits, ``added`` [masked, bytes, 8] float32.

    To add is many times as fast as ``masked_fill_`` on a CPU, and needs no kernel of its own.
    """

    rows: list[int]
    bits: torch.Tensor
    added: torch.Tensor | None

    def apply(self, logits: torch.Tensor) -> None:
        """Sets the logits of forbidden tokens to -inf; ``logits``: [rows, vocab] float32."""
        added = self.added
        if added is None:
            bits = self.bits.to(logits.device, non_blocking=True)
            added = _table(logits.device)[bits.int()]
        added = added.flatten(1)[:, : logits.shape[1]]
        if len(self.rows) == len(logits):
            logits += added
        else:
            logits.index_add_(0, torch.tensor(self.rows, device=logits.device), added)


@cache
def _table(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_ADDED).to(device)


class Masker:
    """Fills in masks in a thread of its own, by all cores and without Python's lock.

    Only one step at a time may have masks: the next one's depend on its tokens.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        # One more id for the end, as in ConstraintVocabulary.
        self._words = vocab_size // 32 + 1
        self._on_cpu, self._pinned = device.type == "cpu", device.type == "cuda"
        self._executor = LLExecutor()
        self._thread = ThreadPoolExecutor(1, "llorch-masks")
        # [most rows so far, bytes of a mask, 8]; reused to avoid the page faults of new memory.
        self._added = torch.empty(0, self._words * 4, 8)

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
            fill_next_token_bitmask_par(self._executor, free, bits)
        for row, mask in zip(rows, bits, strict=True):
            row.matcher.finish_row(mask, row.stop_ids, row.may_stop)
        return Masks([row.row for row in rows], masks.view(torch.uint8), self._expand(bits))

    def _expand(self, bits: Bits) -> torch.Tensor | None:
        if not self._on_cpu:
            return None
        if len(bits) > len(self._added):
            self._added = torch.empty(len(bits), *self._added.shape[1:])
        added = self._added[: len(bits)]
        np.take(_ADDED, bits.view(np.uint8), axis=0, out=added.numpy(), mode="clip")
        return added
