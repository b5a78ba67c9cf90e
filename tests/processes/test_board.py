"""What an engine writes on its board can be read by another process, whatever ends the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from llorch_worker.processes.board import Board

DIE = """
import os, signal, sys
from llorch_worker.processes.board import Board
board = Board(4, int(sys.argv[1]))
board.beat()
board.launch([1, 2])
board.take_in(3)
if sys.argv[2] == "amid a write":
    # The bank is written, but not yet the count of writes.
    board._words = Amid = type("Amid", (), {
        "__init__": lambda self, words: setattr(self, "words", words),
        "__getitem__": lambda self, at: self.words[at],
        "__setitem__": lambda self, at, value: (
            os.kill(os.getpid(), signal.SIGKILL) if at == 1 else
            self.words.__setitem__(at, value)
        ),
    })(board._words)
    board.launch([7, 8, 9])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["at rest", "amid a write"])
def test_the_jobs_in_hand_are_read_after_a_kill(when: str) -> None:
    board, descriptor = Board.shared(4)
    died = subprocess.run(
        [sys.executable, "-c", DIE, str(descriptor), when], pass_fds=[descriptor], check=False
    )
    os.close(descriptor)
    assert died.returncode == -signal.SIGKILL
    assert board.in_hand() == (3, 1, 2)
    assert board.stalled_for_s() > 0


def test_a_job_that_was_taken_in_and_one_whose_step_was_delivered_are_not_in_hand() -> None:
    board = Board(4)
    assert board.in_hand() == ()
    board.take_in(5)
    board.launch([1])
    board.taken_in(5)
    assert board.in_hand() == (1,)
    board.launch([])
    assert board.in_hand() == ()


def test_more_jobs_than_there_is_room_for_leave_the_first() -> None:
    board = Board(2)
    board.launch([1, 2, 3])
    assert board.in_hand() == (1, 2)


def test_a_board_at_rest_shows_no_stall() -> None:
    board = Board(1)
    assert board.stalled_for_s() == 0
    board.beat()
    assert 0 < board.stalled_for_s() < board.stalled_for_s()
    board.rest()
    assert board.stalled_for_s() == 0


def test_a_count_that_is_garbage_is_bounded() -> None:
    board = Board(2)
    board.launch([1])
    for place in range(1, len(board._words)):
        board._words[place] = 2**62
    assert len(board.in_hand()) <= 2
