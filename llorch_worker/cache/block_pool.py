"""The pool of KV blocks: which sequences hold them, and the contents that free blocks keep.

A block is held by one sequence, or by several that begin alike. A block that no sequence holds is
free and keeps its contents until it is allocated again. Blocks without contents are allocated
first, then the one that was freed longest ago.

Two rules keep the tree of contents whole. A sequence that holds a block also holds a block of every
prefix before it, and frees them together, the last block first. If a prefix is held, no free block
has a copy of it. So a prefix is never forgotten before the prefixes that continue it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from weakref import WeakValueDictionary

from llorch_worker.cache.prefix import Prefix


class NoFreeBlocks(Exception):
    """Fewer blocks are free than wanted; none is allocated."""


class BlockAccountingError(Exception):
    """The ledger does not add up, for example because a block is freed twice: a defect."""


class BlockPool:
    """Allocates block ids ``0 .. total - 1``. Not thread-safe: the engine thread owns it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.root = Prefix()
        # Each lives as long as something begins with it.
        self._roots: WeakValueDictionary[str | None, Prefix] = WeakValueDictionary()
        self._holders = [0] * total
        self._contents: list[Prefix | None] = [None] * total
        # Allocated from the end: low ids first, then the last freed.
        self._blank = list(range(total - 1, -1, -1))
        # Free blocks with contents, the one freed longest ago first.
        self._kept: OrderedDict[int, None] = OrderedDict()

    def root_of(self, tenant: str | None) -> Prefix:
        """The root of a tree that only this tenant's sequences share."""
        return self._roots.setdefault(tenant, Prefix())

    @property
    def free_count(self) -> int:
        """The number of blocks that no sequence holds, with or without contents."""
        return len(self._blank) + len(self._kept)

    @property
    def kept_count(self) -> int:
        """Free blocks that keep their contents."""
        return len(self._kept)

    def holders(self, block: int) -> int:
        """How many sequences hold ``block``."""
        return self._holders[block]

    def contents(self, block: int) -> Prefix | None:
        """The published contents of ``block``, until they are forgotten."""
        return self._contents[block]

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks to write to, whose contents are forgotten. Raises NoFreeBlocks."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > self.free_count:
            raise NoFreeBlocks(f"{count} blocks wanted, {self.free_count} of {self.total} free")
        ids = []
        for _ in range(count):
            if not self._blank:
                self._forget(next(iter(self._kept)))
            ids.append(self._blank.pop())
            self._holders[ids[-1]] = 1
        return ids

    def share(self, prefix: Prefix) -> int:
        """A read-only block with the end of ``prefix``; the caller now holds it."""
        block = prefix.copies[0]
        if not self._holders[block]:
            del self._kept[block]
        self._holders[block] += 1
        return block

    def publish(self, block: int, parent: Prefix, token_ids: tuple[int, ...]) -> Prefix:
        """Records that a held ``block`` is full of ``token_ids`` after ``parent``.

        Returns the prefix that ends with it. Nothing may write to the block any more.
        """
        if not self._holders[block] or self._contents[block] is not None:
            raise BlockAccountingError(f"block {block} is free or already published")
        prefix = parent.children.get(token_ids)
        if prefix is None:
            prefix = parent.children[token_ids] = Prefix(parent, token_ids)
        # First, because its windowed layers still have all of it: see WindowPool.
        prefix.copies.insert(0, block)
        self._contents[block] = prefix
        if not self._holders[prefix.copies[-1]]:
            self._forget(prefix.copies[-1])
        return prefix

    def free(self, ids: Ids[int]) -> None:
        """Frees a sequence's blocks. Raises BlockAccountingError for a block that is not held."""
        for block in reversed(ids):
            if not 0 <= block < self.total or not self._holders[block]:
                raise BlockAccountingError(f"block {block} is freed but not held")
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            prefix = self._contents[block]
            if prefix is None:
                self._blank.append(block)
                continue
            self._kept[block] = None
            if len(prefix.copies) > 1:
                self._forget(block)

    def withdraw(self, prefix: Prefix) -> None:
        """Forgets ``prefix`` and all its continuations; holders keep their blocks."""
        if prefix.parent is None:
            raise ValueError("cannot withdraw the root")
        del prefix.parent.children[prefix.token_ids]
        doomed = [prefix]
        while doomed:
            prefix = doomed.pop()
            doomed += prefix.children.values()
            prefix.children.clear()
            for block in prefix.copies:
                self._contents[block] = None
                if not self._holders[block]:
                    del self._kept[block]
                    self._blank.append(block)
            prefix.copies.clear()

    def check_integrity(self) -> None:
        """Raises BlockAccountingError unless every block is either free once or held, and the tree
        knows exactly what the blocks contain."""
        free = {*self._blank, *self._kept}
        if len(free) != self.free_count:
            raise BlockAccountingError("a block is on the free list twice")
        for block in range(self.total):
            if (block in free) == bool(self._holders[block]):
                state = "both free and held" if block in free else "neither free nor held"
                raise BlockAccountingError(f"block {block} is {state}")
            if block in free and (block in self._kept) == (self._contents[block] is None):
                raise BlockAccountingError(f"free block {block} and its contents disagree")
        found: set[int] = set()
        for prefix in self._tree():
            if prefix.parent is None:
                continue
            if any(self._contents[block] is not prefix for block in prefix.copies):
                raise BlockAccountingError("a prefix claims a block of other contents")
            if not prefix.copies:
                raise BlockAccountingError("a prefix was forgotten before one that continues it")
            if len(prefix.copies) > 1 and any(block in free for block in prefix.copies):
                raise BlockAccountingError("a free block copies what others hold")
            found.update(prefix.copies)
        if found != {block for block in range(self.total) if self._contents[block] is not None}:
            raise BlockAccountingError("a block's contents cannot be found")

    def _forget(self, block: int) -> None:
        """Takes its contents from a free block."""
        prefix = self._contents[block]
        assert prefix is not None
        assert prefix.parent is not None
        self._contents[block] = None
        del self._kept[block]
        self._blank.append(block)
        prefix.copies.remove(block)
        if not prefix.copies:
            del prefix.parent.children[prefix.token_ids]

    def _tree(self) -> Iterable[Prefix]:
        rest = [self.root, *self._roots.values()]
        while rest:
            prefix = rest.pop()
            rest += prefix.children.values()
            yield prefix
