"""The tables on the device are those of the host, and only what changed goes there."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import numpy as np
import torch

from llorch_worker.cache import BlockPool, WindowPool
from llorch_worker.engine.block_tables import BlockTables, TableChanges
from llorch_worker.engine.sequence import Sequence, SequenceState

MakeSequence = Callable[..., Sequence]
CPU = torch.device("cpu")


def read(tables: BlockTables, changes: TableChanges) -> list[list[list[int]]]:
    """What a step with these changes reads: for each group a row for each sequence."""
    cells = torch.from_numpy(changes.cells)
    blocks = [torch.from_numpy(each) for each in changes.blocks]
    rows = None if isinstance(changes.rows, slice) else torch.from_numpy(changes.rows)
    read = list(tables.update(changes, cells, blocks, rows))
    assert {table.dtype for table in read} == {torch.int32}, "half the bytes of int64"
    return [table.tolist() for table in read]


def running(make_sequence: MakeSequence, *blocks: int) -> Sequence:
    sequence = make_sequence(4)
    sequence.state = SequenceState.RUNNING
    sequence.blocks = array("q", blocks)
    return sequence


def test_a_step_sends_only_new_blocks(make_sequence: MakeSequence) -> None:
    tables = BlockTables((), CPU)
    first, second = running(make_sequence, 5, 6, 7), running(make_sequence, 9)
    changes = tables.lay_out([first, second])
    assert read(tables, changes)[0][0][:3] == [5, 6, 7]
    assert changes.blocks[0].tolist() == [5, 6, 7, 9]
    assert not len(tables.lay_out([first, second]).cells)
    second.blocks.append(3)
    changes = tables.lay_out([first, second])
    assert changes.blocks[0].tolist() == [3]
    assert isinstance(changes.rows, slice), "a step of all sequences reads the tables in place"
    assert [row[:2] for row in read(tables, changes)[0]] == [[5, 6], [9, 3]]


def test_the_tables_are_right_whoever_comes_grows_shrinks_waits_and_goes(
    make_sequence: MakeSequence,
) -> None:
    chance = random.Random(1)
    window = WindowPool(BlockPool(1000), 1000, window=4, block_size=4)
    window.partners[:] = np.random.default_rng(1).permutation(1000)
    tables = BlockTables((window,), CPU)
    alive: list[Sequence] = []
    moved = 0
    for _ in range(600):
        event = chance.random()
        if not alive or (event < 0.15 and len(alive) < 9):
            alive.append(running(make_sequence, *chance.choices(range(1000), k=2)))
        elif event < 0.3:
            gone = alive.pop(chance.randrange(len(alive)))
            gone.state = SequenceState.FINISHED
        elif event < 0.4:
            # Preempted, and back with other blocks.
            chance.choice(alive).lose_blocks()
        elif event < 0.45:
            tables.forget()
        for sequence in alive:
            if not sequence.blocks or chance.random() < 0.3:
                sequence.blocks.extend(chance.choices(range(1000), k=chance.choice([1, 1, 9])))
            elif chance.random() < 0.1 and len(sequence.blocks) > 1:
                del sequence.blocks[-1:]
                sequence.laid_blocks = min(sequence.laid_blocks, len(sequence.blocks))
        step = [s for s in alive if chance.random() < 0.8]
        if not step:
            continue
        step.sort(key=lambda sequence: tables.rows_of([sequence]))
        changes = tables.lay_out(step)
        moved += isinstance(changes.rows, np.ndarray)
        own, partners = read(tables, changes)
        for sequence, row, windowed in zip(step, own, partners, strict=True):
            blocks = list(sequence.blocks)
            assert row[: len(blocks)] == blocks
            assert windowed[: len(blocks)] == window.partners[blocks].tolist()
    assert 0 < moved < 600
