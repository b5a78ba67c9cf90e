from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.cache import BlockAccountingError, BlockPool, NoFreeBlocks


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.free_count == 0
    pool.free(first)
    assert pool.free_count == 2
    assert sorted(pool.allocate(2)) == sorted(first)


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
    lost = pool._free.pop()
    with pytest.raises(BlockAccountingError, match="neither"):
        pool.check_integrity()
    pool._free += [lost, lost]
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
