"""The KV blocks of sequences: reserving, sharing, allocating, publishing and releasing them.

Sequences share only full blocks, and only to read them: a sequence writes to blocks that it alone
holds and that no other can find yet. Finding and publishing cost work for each new block, not for
each token, because a sequence remembers its place in the prefix tree, even while it waits.

Of layers with a window, a sequence holds only the blocks that its next token may see, and those
that its next step writes (see ``WindowPool``). It finds a prefix only if these layers still have
the window before its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items

from llorch_worker.cache import BlockPool, Prefix, WindowPool
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine_options import PrefixSharing

BlockKey = tuple[Prefix, tuple[int, ...]]
"""The contents of a block that is not published yet: the prefix before it, and its own ids."""


class SequenceBlocks:
    """Gives the blocks of one pool to sequences. Only the engine thread may call it."""

    def __init__(
        self,
        pool: BlockPool,
        windows: Items[WindowPool],
        *,
        block_size: int,
        prefix_caching: bool,
        prefix_sharing: PrefixSharing,
    ) -> None:
        """``block_size`` in tokens. Without ``prefix_caching`` no block is published or found."""
        self._pool = pool
        self._windows = windows
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._prefix_sharing = prefix_sharing
        self._reserved = 0
        self.hits_total = 0
        self.found_tokens_total = 0

    def enter(self, sequence: Sequence) -> None:
        """Places a new sequence at the root of its prefix tree."""
        sequence.prefix = self._root(sequence)

    def fits(self, sequence: Sequence, *, spare: int) -> bool:
        """Whether all known tokens of a waiting sequence fit, with ``spare`` blocks left over."""
        needed = self._blocks_for(len(sequence.token_ids))
        room = self._unreserved - spare
        if needed <= room:
            return True
        # A published block without a holder counts as free, so taking it costs a free block. Only
        # blocks that running sequences hold cost none; the tree is searched only if they decide.
        self._find(sequence)
        prefix = sequence.prefix
        while prefix.parent is not None and not self._pool.holders(prefix.copies[0]):
            prefix = prefix.parent
        return needed - prefix.depth <= room

    def fits_without(
        self, sequence: Sequence, victims: Collection[Sequence], *, spare: int
    ) -> bool:
        """Whether a waiting sequence surely fits once ``victims`` have given up their blocks."""
        # Giving up blocks never takes room: what a victim shares with the sequence then costs a
        # block, and is free. With windows, what is found now may be gone once the sequence starts.
        if not self._windows and self.fits(sequence, spare=spare):
            return True
        listed = Counter(block for victim in victims for block in victim.blocks)
        freed = sum(count == self._pool.holders(block) for block, count in listed.items())
        freed += sum(victim.reserved_blocks for victim in victims)
        return self._blocks_for(len(sequence.token_ids)) <= self._unreserved + freed - spare

    def reserve(self, sequence: Sequence) -> None:
        """Reserves blocks for all known tokens of a sequence that :meth:`fits`."""
        sequence.reserved_blocks = self._blocks_for(len(sequence.token_ids))
        self._reserved += sequence.reserved_blocks

    def take_cached(self, sequence: Sequence) -> None:
        """Gives a prefill the published blocks that hold the tokens it would compute next.

        It computes the others (see ``Sequence.skippable``), at least the last known token: its
        logits give the next one.
        """
        have = len(sequence.blocks)
        if not self._in_tree(sequence) or have * self._block_size != sequence.computed:
            return
        self._find(sequence)
        path = sequence.prefix.path(have)
        if not path:
            return
        found = [self._pool.share(prefix) for prefix in path]
        # Of what others alone have asked, the figures say nothing.
        own = have + sum(sequence.request.tenant in prefix.tenants for prefix in path)
        for prefix in path:
            prefix.tenants.add(sequence.request.tenant)
        if not have:
            self.hits_total += 1
        self.found_tokens_total += len(found) * self._block_size
        self._add(sequence, found, reserved=len(found))
        before = sequence.computed
        sequence.skip_to(len(sequence.blocks) * self._block_size, own * self._block_size)
        for window in self._windows:
            window.share(sequence.blocks[max(have, window.first(sequence.computed)) :])
        self._slide(sequence, before, have)

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        """Gives ``sequence`` the blocks it lacks for its first ``tokens`` tokens.

        It gets its reserved blocks first. Returns False, and gives none, if too few are free.
        """
        missing = -(-tokens // self._block_size) - len(sequence.blocks)
        if missing <= 0:
            return True
        reserved = min(missing, sequence.reserved_blocks)
        if missing - reserved > self._unreserved:
            return False
        blocks = self._pool.allocate(missing)
        self._add(sequence, blocks, reserved)
        for window in self._windows:
            window.allocate(blocks)
        return True

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """Notes that a step has computed the next ``tokens``: lets other sequences find the blocks
        that are full now, and gives up those that the windows have left behind."""
        before = sequence.computed
        sequence.computed = computed = before + tokens
        if self._prefix_caching and computed >= (sequence.prefix.depth + 1) * self._block_size:
            self._publish(sequence)
        if self._windows:
            self._slide(sequence, before, len(sequence.blocks))

    def _publish(self, sequence: Sequence) -> None:
        prefix, size = sequence.prefix, self._block_size
        if not self._in_tree(sequence):
            return
        for index in range(prefix.depth, sequence.computed // size):
            prefix = self._pool.publish(sequence.blocks[index], prefix, self._ids(sequence, index))
            prefix.tenants.add(sequence.request.tenant)
        sequence.prefix = prefix

    def release(self, sequence: Sequence) -> None:
        """Takes back all blocks and reservations. Free blocks keep their published contents."""
        self._pool.free(sequence.blocks)
        for window in self._windows:
            window.free(sequence.blocks[window.first(sequence.computed) :])
        self._reserved -= sequence.reserved_blocks
        sequence.lose_blocks()

    def trim(self, sequence: Sequence) -> None:
        """Takes back the blocks beyond the known tokens: those of drafts that did not hold. No
        launched step may write to them."""
        needed = self._blocks_for(len(sequence.token_ids))
        if spare := sequence.blocks[needed:]:
            self._pool.free(spare)
            for window in self._windows:
                window.free(spare)
            del sequence.blocks[needed:]
            sequence.laid_blocks = min(sequence.laid_blocks, needed)

    def distrust(self, sequence: Sequence) -> None:
        """Forgets all published blocks that begin like ``sequence``: they may be damaged."""
        if sequence.prefix.known and (path := sequence.prefix.path(0)):
            self._pool.withdraw(path[0])

    def completed_key(self, sequence: Sequence, tokens: int) -> BlockKey | None:
        """The first block that the next ``tokens`` of a prefill make full."""
        index = sequence.computed // self._block_size
        full = (index + 1) * self._block_size <= sequence.computed + tokens
        return self._key(sequence, index) if full and self._in_tree(sequence) else None

    def wanted_key(self, sequence: Sequence) -> BlockKey | None:
        """The next block of a prefill, if another sequence's block could serve instead."""
        index, inside = divmod(sequence.computed, self._block_size)
        full = (index + 1) * self._block_size <= sequence.skippable
        return self._key(sequence, index) if full and not inside else None

    def check_integrity(self, holding: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raises ``RuntimeError`` unless the holders and the reservations add up."""
        self._pool.check_integrity()
        holders = [0] * self._pool.total
        partners = [[0] * self._pool.total for _ in self._windows]
        reserved = 0
        for sequence in holding:
            reserved += sequence.reserved_blocks
            if len(set(sequence.blocks)) != len(sequence.blocks):
                raise RuntimeError("a sequence holds a KV block twice")
            for block in sequence.blocks:
                holders[block] += 1
            for window, held in zip(self._windows, partners, strict=True):
                for block in sequence.blocks[window.first(sequence.computed) :]:
                    held[block] += 1
            self._check_contents(sequence)
        if any(holders[block] != self._pool.holders(block) for block in range(self._pool.total)):
            raise RuntimeError("a KV block has more or fewer holders than sequences that list it")
        for window, held in zip(self._windows, partners, strict=True):
            window.check_integrity(held)
        if not reserved == self._reserved <= self._pool.free_count:
            raise RuntimeError(
                f"{self._reserved} KV blocks are reserved, {reserved} of them by running "
                f"sequences, and {self._pool.free_count} are free"
            )
        if any(s.blocks or s.computed or s.reserved_blocks for s in waiting):
            raise RuntimeError("a waiting sequence holds KV blocks")

    def _check_contents(self, sequence: Sequence) -> None:
        before = self._root(sequence)
        for index, block in enumerate(sequence.blocks):
            contents = self._pool.contents(block)
            if contents is None:
                if self._pool.holders(block) > 1 and sequence.prefix.known:
                    raise RuntimeError("two sequences hold a KV block that is not published")
                continue
            if contents.parent is not before or contents.token_ids != self._ids(sequence, index):
                raise RuntimeError("a sequence holds a KV block of another text")
            if (index + 1) * self._block_size > sequence.computed:
                raise RuntimeError("a KV block was published before it was computed")
            before = contents

    def _root(self, sequence: Sequence) -> Prefix:
        if self._prefix_sharing == "tenant":
            return self._pool.root_of(sequence.request.tenant)
        return self._pool.root

    @property
    def _unreserved(self) -> int:
        return self._pool.free_count - self._reserved

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _add(self, sequence: Sequence, blocks: list[int], reserved: int) -> None:
        """``reserved`` of the ``blocks`` were reserved for the sequence."""
        sequence.blocks.extend(blocks)
        sequence.reserved_blocks -= reserved
        self._reserved -= reserved

    def _slide(self, sequence: Sequence, before: int, held: int) -> None:
        """Gives up what the windows needed of the first ``held`` blocks with ``before`` tokens
        computed, and need no more."""
        for window in self._windows:
            end = min(held, window.first(sequence.computed))
            if (first := window.first(before)) < end:
                window.free(sequence.blocks[first:end])

    def _in_tree(self, sequence: Sequence) -> bool:
        """Whether the sequence may find and publish: not while it holds withdrawn blocks."""
        return self._prefix_caching and (sequence.prefix.known or not sequence.blocks)

    def _find(self, sequence: Sequence) -> None:
        """Moves a sequence's place in the tree to the end of what is published of its tokens and
        may be skipped."""
        prefix = sequence.prefix.nearest_known()
        last = sequence.skippable // self._block_size
        while prefix.children and prefix.depth < last:
            child = prefix.children.get(self._ids(sequence, prefix.depth))
            if child is None:
                break
            prefix = child
        sequence.prefix = self._usable(sequence, prefix) if self._windows else prefix

    def _usable(self, sequence: Sequence, prefix: Prefix) -> Prefix:
        """``prefix`` or the end of the longest part of it before which no window lacks a block."""
        path = prefix.path(len(sequence.blocks))
        if not path:
            return prefix
        assert path[0].parent is not None
        usable = path[0].parent
        # For each window the first block from which on all have a partner.
        complete_from = [0] * len(self._windows)
        for node in path:
            usable_here = True
            for index, window in enumerate(self._windows):
                if not window.has(node.copies[0]):
                    complete_from[index] = node.depth
                first = window.first(node.depth * self._block_size)
                usable_here &= complete_from[index] <= first
            if usable_here:
                usable = node
        return usable

    def _key(self, sequence: Sequence, index: int) -> BlockKey:
        return sequence.prefix, self._ids(sequence, index)

    def _ids(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        start = index * self._block_size
        return tuple(sequence.token_ids[start : start + self._block_size])
