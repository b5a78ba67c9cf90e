"""Who holds which KV block: the one ledger of a process."""

from __future__ import annotations

from collections.abc import Iterable


class NoFreeBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was taken."""


class BlockAccountingError(Exception):
    """A block was freed twice, or the ledger does not add up: a defect, never a user's fault."""


class BlockPool:
    """Hands out block ids ``0 .. total - 1``; not thread-safe, the engine thread owns it."""

    def __init__(self, total: int) -> None:
        self.total = total
        # The end of the list goes first: low ids first, then what was freed last (still cached).
        self._free = list(range(total - 1, -1, -1))
        self._held = bytearray(total)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` block ids; raises NoFreeBlocks, and takes none, when there are fewer."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > len(self._free):
            raise NoFreeBlocks(f"{count} blocks wanted, {len(self._free)} of {self.total} free")
        ids = [self._free.pop() for _ in range(count)]
        for block in ids:
            self._held[block] = 1
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back; raises BlockAccountingError for one that nobody holds."""
        for block in ids:
            if not 0 <= block < self.total or not self._held[block]:
                raise BlockAccountingError(f"block {block} was freed but is not held")
            self._held[block] = 0
            self._free.append(block)

    def check_integrity(self) -> None:
        """Raise BlockAccountingError unless each block is either free once or held."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise BlockAccountingError("a block is on the free list twice")
        for block in range(self.total):
            if (block in free) == bool(self._held[block]):
                state = "both free and held" if block in free else "neither free nor held"
                raise BlockAccountingError(f"block {block} is {state}")
