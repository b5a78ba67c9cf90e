"""What the traceback of an error keeps alive."""

from __future__ import annotations

from contextlib import suppress
from traceback import walk_tb


def forget_frames(error: BaseException) -> None:
    """Takes all frames from an error that has been reported, and from those that led to it.

    Their variables hold a job's fields, and often the error itself: a circle, which would last
    until Python's next full garbage collection.
    """
    left: list[BaseException | None] = [error]
    while left:
        if (each := left.pop()) is not None:
            for frame, _ in walk_tb(each.__traceback__):
                # Raised by one that still runs.
                with suppress(RuntimeError):
                    frame.clear()
                    # Until Python 3.12 whoever has read this, as billiard does, has left a copy in
                    # the frame. Reading it again empties the copy.
                    _ = frame.f_locals
            left += [each.__cause__, each.__context__]
            each.__traceback__ = each.__cause__ = each.__context__ = None
