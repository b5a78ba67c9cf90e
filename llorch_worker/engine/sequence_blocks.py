"""Which KV blocks a sequence has: promised, found, allocated, published, given up.

Only full blocks are shared, and only to be read: a sequence writes to blocks that it alone holds
and that nobody can find yet. Finding and publishing cost work for each new block, not for each
token; a sequence remembers its place in the tree of contents, also while it waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from llorch_worker.cache import BlockPool, Prefix
from llorch_worker.engine.sequence import Sequence

BlockKey = tuple[Prefix, tuple[int, ...]]
"""A block's contents before they are published: what comes before, and its own ids."""


class SequenceBlocks:
    """Gives the blocks of one pool to sequences. The engine thread alone calls it."""

    def __init__(self, pool: BlockPool, *, block_size: int, prefix_caching: bool) -> None:
        """``block_size`` in tokens. Without ``prefix_caching`` nothing is published or found."""
        self._pool = pool
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._promised = 0
        self.hits_total = 0
        self.found_tokens_total = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens of one sequence."""
        return -(-tokens // self._block_size)

    def enter(self, sequence: Sequence) -> None:
        """A new sequence begins at the root of the tree."""
        sequence.prefix = self._pool.root

    def fits(self, sequence: Sequence, *, spare: int) -> bool:
        """Whether all known tokens of a waiting sequence fit, with ``spare`` blocks left over."""
        needed = self.blocks_for(len(sequence.token_ids))
        room = self._unpromised - spare
        if needed <= room:
            return True
        # A block that is found free is one free block fewer, as any other. Only what is found
        # with others comes for nothing; so the tree is asked only where that decides.
        self._find(sequence)
        prefix = sequence.prefix
        while prefix.parent is not None and not self._pool.holders(prefix.copies[0]):
            prefix = prefix.parent
        return needed - prefix.depth <= room

    def promise(self, sequence: Sequence) -> None:
        """Keeps room for all known tokens of a sequence that :meth:`fits`."""
        sequence.promised_blocks = self.blocks_for(len(sequence.token_ids))
        self._promised += sequence.promised_blocks

    def take_found(self, sequence: Sequence) -> None:
        """Gives a prefill the published blocks that hold what it would compute next.

        At least the last known token is left to compute: its logits give the next one.
        """
        have = len(sequence.blocks)
        if not self._in_tree(sequence) or have * self._block_size != sequence.computed:
            return
        self._find(sequence)
        found = [self._pool.share(prefix) for prefix in sequence.prefix.path(have)]
        if not found:
            return
        if not have:
            self.hits_total += 1
        self.found_tokens_total += len(found) * self._block_size
        self._keep_promise(sequence, found)
        sequence.find(len(sequence.blocks) * self._block_size)

    def cover(self, sequence: Sequence, tokens: int) -> None:
        """Blocks for the first ``tokens`` tokens, out of those that were promised."""
        missing = self.blocks_for(tokens) - len(sequence.blocks)
        if missing > 0:
            self._keep_promise(sequence, self._pool.allocate(missing))

    def grow(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a decoding sequence; False where too few are free.

        The last token of a prompt, where its chunks leave it over, is a decode too: its block was
        promised.
        """
        missing = self._missing(sequence, 0)
        if missing <= 0:
            return True
        promised = min(missing, sequence.promised_blocks)
        if missing - promised > self._unpromised:
            return False
        self._keep_promise(sequence, self._pool.allocate(promised))
        sequence.blocks.extend(self._pool.allocate(missing - promised))
        return True

    def grow_ahead(self, sequences: Items[Sequence]) -> bool:
        """Blocks for one token more than is known of each decoding sequence; False, and nothing
        given to anyone, where too few are free."""
        missing = [max(0, self._missing(sequence, 1)) for sequence in sequences]
        if (total := sum(missing)) > self._unpromised:
            return False
        if total:
            for sequence, count in zip(sequences, missing, strict=True):
                sequence.blocks.extend(self._pool.allocate(count))
        return True

    def publish(self, sequence: Sequence) -> None:
        """Lets others find the full blocks that were computed. Their step must have succeeded."""
        prefix, size = sequence.prefix, self._block_size
        if sequence.computed < (prefix.depth + 1) * size or not self._in_tree(sequence):
            return
        for index in range(prefix.depth, sequence.computed // size):
            prefix = self._pool.publish(sequence.blocks[index], prefix, self._ids(sequence, index))
        sequence.prefix = prefix

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks and promises back. Published blocks keep their contents for now."""
        self._pool.free(sequence.blocks)
        self._promised -= sequence.promised_blocks
        sequence.lose_blocks()

    def distrust(self, sequence: Sequence) -> None:
        """Forgets all that begins like ``sequence``: what it was computed from may be damaged."""
        if sequence.prefix.known and (path := sequence.prefix.path(0)):
            self._pool.withdraw(path[0])

    def completes(self, sequence: Sequence, tokens: int) -> BlockKey | None:
        """The first block that the next ``tokens`` of a prefill make full; later ones follow it."""
        index = sequence.computed // self._block_size
        full = (index + 1) * self._block_size <= sequence.computed + tokens
        return self._key(sequence, index) if full and self._in_tree(sequence) else None

    def could_share(self, sequence: Sequence) -> BlockKey | None:
        """The next block of a prefill, where another might be found in its place."""
        index, inside = divmod(sequence.computed, self._block_size)
        full = (index + 1) * self._block_size < len(sequence.token_ids)
        return self._key(sequence, index) if full and not inside else None

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raises ``RuntimeError`` unless holders and promises add up."""
        self._pool.check_integrity()
        holders = [0] * self._pool.total
        promised = 0
        for sequence in running:
            promised += sequence.promised_blocks
            if len(set(sequence.blocks)) != len(sequence.blocks):
                raise RuntimeError("a sequence holds a KV block twice")
            for block in sequence.blocks:
                holders[block] += 1
            self._check_contents(sequence)
        if any(holders[block] != self._pool.holders(block) for block in range(self._pool.total)):
            raise RuntimeError("a KV block has more or fewer holders than sequences that list it")
        if not promised == self._promised <= self._pool.free_count:
            raise RuntimeError(
                f"{self._promised} KV blocks are promised, {promised} of them to running "
                f"sequences, and {self._pool.free_count} are free"
            )
        if any(s.blocks or s.computed or s.promised_blocks for s in waiting):
            raise RuntimeError("a waiting sequence holds KV blocks")

    def _check_contents(self, sequence: Sequence) -> None:
        before = self._pool.root
        for index, block in enumerate(sequence.blocks):
            contents = self._pool.contents(block)
            if contents is None:
                if self._pool.holders(block) > 1 and sequence.prefix.known:
                    raise RuntimeError("a KV block that nobody can find is held by two sequences")
                continue
            if contents.parent is not before or contents.token_ids != self._ids(sequence, index):
                raise RuntimeError("a sequence holds a KV block of another text")
            if (index + 1) * self._block_size > sequence.computed:
                raise RuntimeError("a KV block that is not computed can be found")
            before = contents

    @property
    def _unpromised(self) -> int:
        return self._pool.free_count - self._promised

    def _missing(self, sequence: Sequence, ahead: int) -> int:
        """Blocks that it lacks for its tokens and ``ahead`` more."""
        return self.blocks_for(len(sequence.token_ids) + ahead) - len(sequence.blocks)

    def _in_tree(self, sequence: Sequence) -> bool:
        """Whether the sequence may find and publish: not while it holds what was withdrawn."""
        return self._prefix_caching and (sequence.prefix.known or not sequence.blocks)

    def _find(self, sequence: Sequence) -> None:
        """Moves a sequence's place in the tree to the end of what is published of its tokens."""
        prefix = sequence.prefix.nearest_known()
        last = (len(sequence.token_ids) - 1) // self._block_size
        while prefix.children and prefix.depth < last:
            child = prefix.children.get(self._ids(sequence, prefix.depth))
            if child is None:
                break
            prefix = child
        sequence.prefix = prefix

    def _keep_promise(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.blocks.extend(blocks)
        sequence.promised_blocks -= len(blocks)
        self._promised -= len(blocks)

    def _key(self, sequence: Sequence, index: int) -> BlockKey:
        return sequence.prefix, self._ids(sequence, index)

    def _ids(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        start = index * self._block_size
        return tuple(sequence.token_ids[start : start + self._block_size])
