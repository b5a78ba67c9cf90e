"""The KV blocks of layers with a window, which keep only the tokens that a next token may see.

Sequences hold blocks of one :class:`BlockPool`, whichever layers keep their tokens. For each block
that its window touches, a sequence also holds a *partner* here, in which the windowed layers keep
the same tokens. Sequences that share a block share its partner. A partner that no sequence needs
any more stays until another block needs one, so that later prompts may find it. The one that was
given up longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Ids

import numpy as np

from llorch_worker.cache.block_pool import BlockAccountingError, BlockPool


class WindowPool:
    """Gives partners, ids ``0 .. total - 1``, to blocks of ``pool``. The engine thread owns it."""

    def __init__(self, pool: BlockPool, total: int, *, window: int, block_size: int) -> None:
        """``window``: a query sees so many tokens, itself included. ``block_size`` in tokens."""
        self.total = total
        self.partners = np.zeros(pool.total, np.int64)
        """For each block of the pool its partner; any id if it has none."""
        self._pool = pool
        self.window = window
        self._block_size = block_size
        self._holders = [0] * pool.total
        # Allocated from the end: low ids first, then the last freed.
        self._blank = list(range(total - 1, -1, -1))
        # Blocks whose partners no sequence holds, the one given up longest ago first.
        self._kept: OrderedDict[int, None] = OrderedDict()

    def first(self, computed: int) -> int:
        """Which of its blocks is the first that a sequence needs with so many tokens computed."""
        return max(0, computed + 1 - self.window) // self._block_size

    def has(self, block: int) -> bool:
        """Whether ``block`` has a partner."""
        return self._holders[block] > 0 or block in self._kept

    def allocate(self, blocks: Ids[int]) -> None:
        """Gives partners to newly allocated blocks. There are enough: see ``CacheShape``."""
        for block in blocks:
            if block in self._kept:  # of its former contents
                del self._kept[block]
            else:
                if not self._blank:
                    oldest, _ = self._kept.popitem(last=False)
                    self._blank.append(int(self.partners[oldest]))
                self.partners[block] = self._blank.pop()
            self._holders[block] = 1

    def share(self, blocks: Ids[int]) -> None:
        """Holds the partners that ``blocks`` have, to read them."""
        for block in blocks:
            if not self._holders[block]:
                del self._kept[block]
            self._holders[block] += 1

    def free(self, blocks: Ids[int]) -> None:
        """Gives up the partners of a sequence's ``blocks``. Of those with contents, the last
        block's is reused first."""
        for block in reversed(blocks):
            if not self._holders[block]:
                raise BlockAccountingError(f"the partner of block {block} is freed but not held")
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._pool.contents(block) is None:
                self._blank.append(int(self.partners[block]))
            else:
                self._kept[block] = None

    def check_integrity(self, holders: Ids[int]) -> None:
        """Raises BlockAccountingError unless each block's partner has so many ``holders``, and each
        partner is blank or belongs to one block."""
        if list(holders) != self._holders:
            raise BlockAccountingError("a partner has more or fewer holders than need it")
        if any(self._holders[block] for block in self._kept):
            raise BlockAccountingError("a partner is both free and held")
        blocks = [block for block in range(self._pool.total) if self.has(block)]
        if sorted([*self._blank, *self.partners[blocks].tolist()]) != list(range(self.total)):
            raise BlockAccountingError("a partner belongs to none, or to two blocks")
