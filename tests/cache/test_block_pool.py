from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llorch_worker.cache import BlockAccountingError, BlockPool, NoFreeBlocks, Prefix


def test_too_few_blocks_take_none() -> None:
    pool = BlockPool(3)
    with pytest.raises(NoFreeBlocks, match="4 blocks wanted, 3 of 3 free"):
        pool.allocate(4)
    assert pool.free_count == 3


def test_a_block_freed_twice_is_a_defect() -> None:
    pool = BlockPool(3)
    ids = pool.allocate(1)
    pool.free(ids)
    with pytest.raises(BlockAccountingError, match="not held"):
        pool.free(ids)
    with pytest.raises(BlockAccountingError):
        pool.free([3])
    with pytest.raises(BlockAccountingError):
        pool.free([-1])


def test_a_negative_count_is_a_defect() -> None:
    with pytest.raises(ValueError, match="-1"):
        BlockPool(3).allocate(-1)


def test_the_integrity_check_finds_a_lost_and_a_doubled_block() -> None:
    pool = BlockPool(3)
    pool.check_integrity()
    lost = pool._blank.pop()
    with pytest.raises(BlockAccountingError, match="neither"):
        pool.check_integrity()
    pool._blank += [lost, lost]
    with pytest.raises(BlockAccountingError, match="twice"):
        pool.check_integrity()


@given(st.lists(st.integers(-6, 6)))
def test_no_order_of_calls_breaks_the_ledger(calls: list[int]) -> None:
    pool = BlockPool(16)
    held: list[list[int]] = []
    for call in calls:
        if call >= 0 and call <= pool.free_count:
            held.append(pool.allocate(call))
        elif call < 0 and held:
            pool.free(held.pop(call % len(held)))
        pool.check_integrity()
        ids = [block for group in held for block in group]
        assert len(set(ids)) == len(ids) == pool.total - pool.free_count


def filled(pool: BlockPool, *texts: int) -> tuple[list[int], Prefix]:
    """Blocks of one token each that hold ``texts``, and the whole."""
    blocks, prefix = pool.allocate(len(texts)), pool.root
    for block, text in zip(blocks, texts, strict=True):
        prefix = pool.publish(block, prefix, (text,))
    return blocks, prefix


def test_a_free_block_keeps_its_contents_until_it_is_needed() -> None:
    pool = BlockPool(4)
    blocks, whole = filled(pool, 1, 2)
    pool.free(blocks)
    assert (pool.free_count, pool.kept_count) == (4, 2)
    assert [pool.share(prefix) for prefix in whole.path(0)] == blocks
    assert pool.free_count == 2
    pool.free(blocks)
    pool.allocate(3)
    assert not whole.known
    assert whole.nearest_known().depth == 1
    pool.allocate(1)
    assert whole.nearest_known() is pool.root
    assert pool.root.children == {}


def test_a_shared_block_is_free_when_the_last_holder_gives_it_up() -> None:
    pool = BlockPool(2)
    (block,), whole = filled(pool, 1)
    assert pool.share(whole) == block
    pool.free([block])
    assert (pool.holders(block), pool.free_count) == (1, 1)
    pool.free([block])
    assert (pool.holders(block), pool.free_count) == (0, 2)
    with pytest.raises(BlockAccountingError, match="not held"):
        pool.free([block])


def test_equal_contents_are_kept_once() -> None:
    pool = BlockPool(4)
    first, whole = filled(pool, 1)
    second, again = filled(pool, 1)
    assert whole is again
    pool.free(first)
    assert pool.kept_count == 0
    pool.free(second)
    assert pool.kept_count == 1
    third, _ = filled(pool, 1)
    assert pool.kept_count == 0
    pool.free(third)
    pool.check_integrity()


def test_texts_of_one_hash_are_two_texts() -> None:
    """-1 and -2 have the same hash in Python, so equal blocks of them collide."""
    assert hash((-1,)) == hash((-2,))
    pool = BlockPool(4)
    (first, _), whole = filled(pool, -1, 5)
    (second, _), other = filled(pool, -2, 5)
    assert whole is not other
    assert pool.root.children[-1,].copies == [first]
    assert pool.root.children[-2,].copies == [second]


def test_withdrawn_contents_are_gone_with_all_that_follows_them() -> None:
    pool = BlockPool(6)
    blocks, whole = filled(pool, 1, 2, 3)
    other, kept = filled(pool, 4)
    pool.free(other)
    pool.withdraw(whole.path(0)[1])
    pool.check_integrity()
    assert whole.nearest_known().depth == 1
    assert kept.known
    pool.free(blocks)
    assert pool.kept_count == 2
    with pytest.raises(ValueError, match="root"):
        pool.withdraw(pool.root)


def test_only_a_held_block_without_contents_is_published() -> None:
    pool = BlockPool(2)
    blocks, _ = filled(pool, 1)
    with pytest.raises(BlockAccountingError, match="already published"):
        pool.publish(blocks[0], pool.root, (2,))
    with pytest.raises(BlockAccountingError, match="is free"):
        pool.publish(1, pool.root, (2,))


class PrefixTree(RuleBasedStateMachine):
    """Holders of random texts that share, compute, publish and give up at random."""

    @initialize(total=st.integers(1, 10))
    def open(self, total: int) -> None:
        self.pool = BlockPool(total)
        self.held: list[tuple[list[int], Prefix]] = []
        self.written: dict[int, tuple[int, ...]] = {}

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=5), find=st.integers(0, 5))
    def come(self, text: list[int], find: int) -> None:
        """Finds up to ``find`` blocks and computes the rest, if there is room."""
        prefix = self.pool.root
        while prefix.depth < min(find, len(text)):
            child = prefix.children.get((text[prefix.depth],))
            if child is None:
                break
            prefix = child
        blocks = [self.pool.share(found) for found in prefix.path(0)]
        for depth, block in enumerate(blocks):
            assert self.written[block] == tuple(text[: depth + 1])
        if len(text) - len(blocks) > self.pool.free_count:
            self.pool.free(blocks)
            return
        for block in self.pool.allocate(len(text) - len(blocks)):
            self.written[block] = tuple(text[: len(blocks) + 1])
            prefix = self.pool.publish(block, prefix, (text[len(blocks)],))
            blocks.append(block)
        self.held.append((blocks, prefix))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        blocks, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(blocks)

    @invariant()
    def the_ledger_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        holders: dict[int, int] = {}
        for blocks, prefix in self.held:
            assert prefix.known
            for block in blocks:
                holders[block] = holders.get(block, 0) + 1
        for block in range(self.pool.total):
            assert self.pool.holders(block) == holders.get(block, 0)


TestPrefixTree: Any = PrefixTree.TestCase
