"""The output of ``llorch batch run``, which is also the state from which it goes on."""

from __future__ import annotations

import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from llorch_worker.batches.lines import encoded, is_failure
from llorch_worker.contract.command_errors import CommandError, usage_error

SUFFIX = ".batch"
"""Of the file beside the output, which exists until the output is complete."""
_STATE: Final = re.compile(
    rb'\{"run": "(?P<run>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", '
    rb'"input": "(?P<input>[0-9a-f]{64})"\}'
)
_MOST_STATE_BYTES: Final = 2**10


class BatchOutput:
    """The answers, in the order of the lines: as many lines are done as the output has whole lines.

    ``run_id``: what the ids of this run's jobs follow from. ``lines`` and ``failed``: written so
    far.
    """

    def __init__(self, file: BinaryIO, run_id: uuid.UUID, lines: int, failed: int) -> None:
        self._file = file
        self.run_id = run_id
        self.lines = lines
        self.failed = failed

    def write(self, document: dict[str, Any]) -> None:
        self._file.write(encoded(document))
        self._file.flush()
        self.lines += 1
        self.failed += is_failure(document)


@contextmanager
def written_to(path: Path, digest: str) -> Iterator[BatchOutput]:
    """The output at ``path`` of the input with this ``digest``, begun now or by an earlier run.

    Raises:
        CommandError: the output belongs to another input, is complete, or is in use.
    """
    beside = path.with_name(path.name + SUFFIX)
    if path.exists() and path.stat().st_size and not beside.exists():
        raise usage_error(f"{path} is complete, or not of a batch: remove it, or choose another")
    with beside.open("a+b") as state:
        try:
            fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError("BATCH_RUNS", f"another process writes {path}") from None
        run_id = _run_id(state, beside, digest)
        with path.open("r+b" if path.exists() else "w+b") as file:
            output = BatchOutput(file, run_id, *_recovered(file))
            yield output
        # Not reached by an error or an interrupt.
        beside.unlink()


def _run_id(state: BinaryIO, path: Path, digest: str) -> uuid.UUID:
    state.seek(0)
    written = state.read(_MOST_STATE_BYTES)
    if not written.strip(b"\0") and len(written) < _MOST_STATE_BYTES:
        # New, or killed before it was written. A machine that crashes may leave NUL bytes.
        state.truncate(0)
        run_id = uuid.uuid4()
        state.write(json.dumps({"run": str(run_id), "input": digest}).encode())
        state.flush()
        os.fsync(state.fileno())
        return run_id
    if (known := _STATE.fullmatch(written)) is None:
        raise usage_error(
            f"{path} exists and is not the state file of a batch run: move it, or choose another "
            "output"
        )
    if known["input"].decode() != digest:
        raise usage_error(
            f"the input or the options are not those with which this output began; give the same, "
            f"or remove the output and {path}"
        )
    return uuid.UUID(known["run"].decode())


def _recovered(file: BinaryIO) -> tuple[int, int]:
    """Cuts off half a line, and returns how many lines and failed lines there are."""
    lines = failed = end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        end += len(line)
        lines += 1
        failed += is_failure(json.loads(line))
    file.truncate(end)
    file.seek(end)
    return lines, failed
