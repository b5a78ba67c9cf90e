"""A child that does what it is told, and says the rest again."""

from __future__ import annotations

import os
import signal
import socket
import struct

from llorch_worker.processes.frames import Frames


def main(connection: int, *_: int) -> None:
    end = socket.socket(fileno=connection)
    frames = Frames(end)
    while (told := frames.receive()) is not None:
        match told.decode().split():
            case ["exit", code]:
                os._exit(int(code))
            case ["signal", name]:
                os.kill(os.getpid(), int(name) if name.isdecimal() else signal.Signals[name])
            case ["half", "a", "frame"]:
                end.sendall(struct.pack("<I", 100) + b"half")
                os.kill(os.getpid(), signal.SIGSEGV)
            case ["noise"]:
                end.sendall(b"printed by a library")
            case ["hang", "up"]:
                end.shutdown(socket.SHUT_RDWR)
                signal.pause()
            case _:
                frames.send(told)
    os._exit(0)
