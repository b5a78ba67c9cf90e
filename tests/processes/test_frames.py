"""Frames arrive whole, in order and within a limit."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from llorch_worker.processes.frames import Frames, FrameTooLarge, NoFrame


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Frames]]:
    """A bare end, and the frames of the other; a frame has at most 1,000 bytes."""
    bare, framed = socket.socketpair()
    with bare, framed:
        yield bare, Frames(framed, most_bytes=1000)


def test_frames_arrive_as_they_were_sent_from_any_thread() -> None:
    left, right = socket.socketpair()
    sending, receiving = Frames(left), Frames(right)
    sent = [bytes([number]) * (1 + 7**number) for number in range(8)]
    threads = [threading.Thread(target=sending.send, args=(each,)) for each in sent]
    for thread in threads:
        thread.start()
    received = [receiving.receive() for _ in sent]
    for thread in threads:
        thread.join()
    assert sorted(received, key=lambda frame: len(frame or b"")) == sent
    sending.close()
    assert receiving.receive() is None
    receiving.close()


def test_an_empty_frame_is_one(ends: tuple[socket.socket, Frames]) -> None:
    bare, framed = ends
    bare.sendall(bytes(8))
    assert framed.receive() == framed.receive() == b""


def test_a_frame_that_comes_in_pieces_is_put_together(ends: tuple[socket.socket, Frames]) -> None:
    bare, framed = ends
    received: list[bytes | None] = []
    reader = threading.Thread(target=lambda: received.append(framed.receive()))
    reader.start()
    for byte in struct.pack("<I", 3) + b"abc":
        bare.sendall(bytes([byte]))
    reader.join()
    assert received == [b"abc"]


def test_of_a_frame_that_is_too_large_nothing_is_sent(ends: tuple[socket.socket, Frames]) -> None:
    bare, framed = ends
    with pytest.raises(FrameTooLarge, match="1001 bytes; at most 1000"):
        framed.send(bytes(1001))
    framed.send(bytes(1000))
    assert bare.recv(4) == struct.pack("<I", 1000)


@pytest.mark.parametrize("garbage", [b"Traceback (most recent call last)", b"\xff" * 4])
def test_garbage_is_no_frame(ends: tuple[socket.socket, Frames], garbage: bytes) -> None:
    bare, framed = ends
    bare.sendall(garbage)
    with pytest.raises(NoFrame, match="at most 1000"):
        framed.receive()


@pytest.mark.parametrize("part", [b"\x01", struct.pack("<I", 5) + b"four"])
def test_a_connection_that_ends_amid_a_frame_is_told_from_one_that_ends(
    ends: tuple[socket.socket, Frames], part: bytes
) -> None:
    bare, framed = ends
    bare.sendall(part)
    bare.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match=f"ended after {len(part)} bytes"):
        framed.receive()
