"""A thread for the length of a battle."""

from __future__ import annotations

import threading

STOP_TIMEOUT_S = 10.0


class Background:
    """Runs ``_run``, which returns soon after ``_stopping`` is set, in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._guarded, name=f"battle-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Raises RuntimeError if it could not go on."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        if self._failures:
            raise RuntimeError(f"{self._thread.name} failed") from self._failures.pop()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._failures.append(error)
            raise

    def _run(self) -> None:
        raise NotImplementedError
