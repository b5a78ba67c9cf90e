"""What is sent to a process comes whole and in order, and nobody waits for it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from llorch_worker.processes.frames import Frames, FrameTooLarge
from llorch_worker.processes.outbox import Outbox
from tests.waiting import wait_until

LARGE = 2**20
"""Bytes that no socket takes at once."""


@pytest.fixture
def ends() -> Iterator[tuple[Outbox, Frames]]:
    ours, theirs = map(Frames, socket.socketpair())
    outbox = Outbox(ours, "outbox")
    yield outbox, theirs
    theirs.close()
    outbox.close()
    ours.close()


def test_frames_of_many_threads_arrive_whole_and_each_thread_s_in_order(
    ends: tuple[Outbox, Frames],
) -> None:
    outbox, theirs = ends
    count = 60

    def send(name: int) -> None:
        for number in range(count):
            size = LARGE if number % 20 == 7 else 100
            outbox.send(bytes([name, number]) + bytes(size))

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    heard: dict[int, list[int]] = {name: [] for name in range(4)}
    for _ in range(4 * count):
        frame = theirs.receive(60)
        assert frame is not None
        heard[frame[0]].append(frame[1])
        assert len(frame) == 2 + (LARGE if frame[1] % 20 == 7 else 100)
    for thread in threads:
        thread.join()
    assert all(numbers == [*range(count)] for numbers in heard.values())


def test_nobody_waits_for_an_end_that_reads_nothing(ends: tuple[Outbox, Frames]) -> None:
    outbox, theirs = ends
    for number in range(20):
        outbox.send(bytes([number]) * LARGE)
    received = [theirs.receive(60) for _ in range(20)]
    assert [frame and frame[0] for frame in received] == [*range(20)]


def test_what_a_signal_s_handler_sends_amid_a_send_follows_it(
    ends: tuple[Outbox, Frames], monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, theirs = ends
    send_now = Frames.send_now
    asked = [True]

    def interrupted(frames: Frames, payload: bytes) -> memoryview:
        if asked:
            asked.clear()
            signal.raise_signal(signal.SIGUSR2)
        return send_now(frames, payload)

    before = signal.signal(signal.SIGUSR2, lambda *_: outbox.send(b"handler"))
    try:
        monkeypatch.setattr(Frames, "send_now", interrupted)
        outbox.send(b"first")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [theirs.receive(60), theirs.receive(60)] == [b"first", b"handler"]


def test_sends_to_an_end_that_is_gone_do_nothing(ends: tuple[Outbox, Frames]) -> None:
    outbox, theirs = ends
    outbox.send(bytes(2 * LARGE))
    theirs.close()
    for _ in range(3):
        outbox.send(b"late")
    wait_until(lambda: not outbox._sending.locked())
    assert not outbox._payloads


def test_what_is_too_large_is_refused_and_the_next_frame_is_sent(
    ends: tuple[Outbox, Frames], monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, theirs = ends
    monkeypatch.setattr(outbox._frames, "_most_bytes", 10)
    with pytest.raises(FrameTooLarge):
        outbox.send(bytes(11))
    outbox.send(b"short")
    assert theirs.receive(60) == b"short"
