"""What a run of a batch makes of what earlier runs left."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from llorch_worker.client import AsyncClient
from llorch_worker.gateway.batches.parts import part_path
from llorch_worker.gateway.batches.record import (
    Batch,
    BatchRecord,
    Counts,
    Part,
    Status,
    new_batch_id,
)
from llorch_worker.gateway.batches.run import BatchRun
from llorch_worker.gateway.batches.store import BatchStore
from llorch_worker.gateway.files.record import FileRecord, FileRecords, remove_bytes
from llorch_worker.gateway.files.store import FileStore
from llorch_worker.gateway.keys import Caller
from tests.services import RedisServer

NOBODY = Caller()


@pytest.mark.parametrize(
    ("was", "errors"), [("in_progress", ["file_not_found"]), ("finalizing", [])]
)
def test_answers_outlive_the_input_of_their_batch(
    own_server: RedisServer, tmp_path: Path, was: Status, errors: list[str]
) -> None:
    files = FileStore(str(tmp_path))
    done, output = asyncio.run(taken_over(own_server.url, files, was))
    assert done.status == ("failed" if errors else "completed")
    assert [fault.code for fault in (done.errors.data if done.errors else [])] == errors
    assert done.request_counts == Counts(total=3 if errors else 2, completed=2)
    with files.open(output.path) as file:
        assert file.read() == b"a\nb\n"
    assert files.names(output.path.rpartition("/")[0]) == [output.path]


async def taken_over(url: str, files: FileStore, was: Status) -> tuple[Batch, FileRecord]:
    """The end of a batch whose driver died with two answers on disk, and its output."""
    now_s = int(time.time())
    lines = 2 if was == "finalizing" else 3
    batch = Batch(
        id=new_batch_id(),
        endpoint="/v1/completions",
        input_file_id="file-deleted",
        completion_window="1h",
        status=was,
        created_at=now_s,
        expires_at=now_s + 3600,
        request_counts=Counts(total=lines, completed=lines),
    )
    part = Part(name="dead-0", counts=Counts(total=2, completed=2), output_bytes=4, error_bytes=0)
    record = BatchRecord(
        id=batch.id,
        owner="",
        created_at=now_s,
        batch=batch,
        input_path="uploads/deleted",
        parts=[part],
    )
    files.write(part_path(record.folder, part.name, "output"), [b"a\nb\n"])
    async with AsyncClient(url) as client:
        store = BatchStore(client.redis, url, "batch", BatchRecord)
        await store.add(record, now_s)
        claimed = await store.claim(batch.id, "token")
        assert claimed is not None
        await BatchRun(
            client,
            store,
            files,
            claimed,
            "token",
            adapt=lambda request, _: asyncio.sleep(0, request),
            window=1,
            refuse_unknown=False,
            keep_s=60,
            on_end=lambda _: asyncio.sleep(0),
        ).run()
        done = (await store.get(NOBODY, batch.id)).batch
        assert done.output_file_id is not None
        records = FileRecords(client.redis, url, "file", FileRecord)
        return done, await records.get(NOBODY, done.output_file_id)


def test_parts_that_a_batch_left_go_with_its_first_file(tmp_path: Path) -> None:
    files = FileStore(str(tmp_path))
    folder = "batches/batch_x"
    names = ["token.output", "token.error", "token-0.output", "dead-0.error", "dead.output"]
    output, errors, *_ = [f"{folder}/{name}" for name in names]
    for name in names:
        files.write(f"{folder}/{name}", [b"x"])
    remove_bytes(files, written_by_batch(output))
    assert files.names(folder) == [errors]
    remove_bytes(files, written_by_batch(errors))
    assert not (tmp_path / folder).exists()


def written_by_batch(path: str) -> FileRecord:
    return FileRecord(
        id="file-x",
        owner="",
        created_at=0,
        filename="x",
        purpose="batch_output",
        bytes=1,
        path=path,
    )
