"""One batch, driven by the gateway that holds its lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress

from llorch_worker.batches.driver import Adapt, Driver
from llorch_worker.batches.endpoints import ENDPOINTS
from llorch_worker.batches.lines import (
    BatchCancelled,
    BatchExpired,
    End,
    Line,
    OpenAILine,
    OpenAIRules,
    encoded,
    fields_of,
    is_failure,
)
from llorch_worker.batches.raw_lines import RawLine, Survey, raw_lines, read_blocks, survey
from llorch_worker.client import AsyncClient, BrokerUnavailable
from llorch_worker.contract.errors import MOST_FAULTS
from llorch_worker.gateway.batches.parts import KINDS, PartWriter, Written, joined, remove_parts
from llorch_worker.gateway.batches.record import (
    BatchFault,
    BatchFaults,
    BatchRecord,
    Counts,
    Part,
    Status,
)
from llorch_worker.gateway.batches.store import LEASE_S, BatchStore, LeaseLost
from llorch_worker.gateway.files.record import FileRecord
from llorch_worker.gateway.files.store import FileStore
from llorch_worker.gateway.files.threads import in_thread

logger = logging.getLogger(__name__)

RENEW_S = LEASE_S / 5


class BatchRun:
    """``keep_s``: how long the record of a batch stays after its end, and its files unless it says
    otherwise. ``on_end`` gets the batch's id then."""

    def __init__(
        self,
        client: AsyncClient,
        store: BatchStore,
        files: FileStore,
        record: BatchRecord,
        token: str,
        *,
        adapt: Adapt,
        window: int,
        refuse_unknown: bool,
        keep_s: int,
        on_end: Callable[[str], Awaitable[None]],
    ) -> None:
        self._store = store
        self._files = files
        self._record = record
        self._batch = record.batch
        self._shown = record.batch.request_counts
        self._token = token
        self._keep_s = keep_s
        self._refuse_unknown = refuse_unknown
        self._on_end = on_end
        self._done = _sum(part.counts for part in record.parts)
        self._parts = PartWriter(files, record.folder, token, self._note_part)
        self._ending = False
        self._driver = Driver(client, record.number, window=window, adapt=adapt, owner=record.owner)

    async def run(self) -> None:
        """Drives the batch to its end.

        Raises:
            LeaseLost: another gateway drives it.
            OSError: the store of files does not answer. A later run goes on.
        """
        # The latter two end by errors only.
        tasks = [
            asyncio.create_task(each) for each in (self._work(), self._renew(), self._write_parts())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def release(self) -> None:
        """Lets another gateway take the batch at once."""
        with suppress(LeaseLost, BrokerUnavailable):
            await self._store.save(self._record, self._token, whole=False, lease_s=0)

    async def _renew(self) -> None:
        while True:
            if not self._ending:
                await self._renew_once()
            await asyncio.sleep(RENEW_S)

    async def _renew_once(self) -> None:
        self._count()
        try:
            cancelling_at = await self._store.save(self._record, self._token, whole=False)
        except BrokerUnavailable as error:
            logger.warning("batch %s: the lease is not renewed: %s", self._record.id, error)
        except LeaseLost:
            # Its end may have come in between.
            if not self._ending:
                raise
        else:
            self._stop_if_due(cancelling_at)

    async def _write_parts(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._parts.write_if_old()

    def _stop_if_due(self, cancelling_at: int | None) -> None:
        if self._driver.stopped or self._batch.status == "finalizing":
            return
        if cancelling_at is not None:
            self._batch.cancelling_at = cancelling_at
            self._record.stopped_as = "cancelled"
            self._driver.stop(BatchCancelled("the batch was cancelled before this line was run"))
        elif time.time() >= self._batch.expires_at:
            self._record.stopped_as = "expired"
            self._driver.stop(
                BatchExpired("this line could not be run before the completion window ended")
            )

    async def _work(self) -> None:
        if self._batch.status == "finalizing":
            # All lines are in its parts, and the input may be gone.
            await self._finish()
            return
        try:
            found = await in_thread(self._survey)
        except FileNotFoundError:
            await self._fail_without_input()
        except ValueError as error:
            await self._fail("too_many_lines", str(error))
        else:
            if not found.lines:
                await self._fail("empty_file", "the input file has no lines")
            elif faults := list(_faults(found)):
                await self._fail_with(faults)
            else:
                await self._answer(found)

    async def _answer(self, found: Survey) -> None:
        self._batch.request_counts.total = found.lines
        if self._batch.status == "validating":
            self._batch.status, self._batch.in_progress_at = "in_progress", _now()
        await self._save()
        async with aclosing(self._driver.ends(self._lines(found))) as ends:
            async for line, end in ends:
                # A long answer would stop the event loop.
                document = await in_thread(_written, line, self._driver.job_id(line), end)
                await self._parts.add(document)
        await self._parts.write()
        await self._finish()

    def _survey(self) -> Survey:
        with self._files.open(self._record.input_path) as file:
            return survey(file)

    async def _lines(self, found: Survey) -> AsyncIterator[Line]:
        """Those that are in no part yet."""
        rules = OpenAIRules(
            {self._batch.endpoint: ENDPOINTS[self._batch.endpoint]},
            found.repeated,
            refuse_unknown=self._refuse_unknown,
        )
        skip = self._done.total
        file = await in_thread(self._files.open, self._record.input_path)
        try:
            some = raw_lines(read_blocks(file))
            while (lines := await in_thread(next, some, None)) is not None:
                # A large line would stop the event loop.
                for line in await in_thread(_read, lines[skip:], rules):
                    yield line
                skip = max(0, skip - len(lines))
        finally:
            file.close()

    async def _note_part(self, part: Part) -> None:
        self._record.parts.append(part)
        self._done = _sum((self._done, part.counts))
        await self._save()

    async def _finish(self) -> None:
        if self._batch.status != "finalizing":
            self._batch.status, self._batch.finalizing_at = "finalizing", _now()
            await self._save()
        keep_s = self._record.output_keep_s or self._keep_s
        output, error = [
            await in_thread(joined, self._files, self._record, self._token, kind, keep_s)
            for kind in KINDS
        ]
        self._batch.output_file_id = None if output is None else output.id
        self._batch.error_file_id = None if error is None else error.id
        files = [file for file in (output, error) if file]
        failed = bool(self._batch.errors)
        await self._end(self._record.stopped_as or ("failed" if failed else "completed"), files)

    async def _fail_without_input(self) -> None:
        fault = BatchFault(code="file_not_found", message="the input file was deleted")
        if not self._record.parts:
            await self._fail_with([fault])
            return
        # The answers that an earlier driver wrote are kept; those that it only counted are lost.
        self._batch.errors = BatchFaults(data=[fault])
        self._shown = Counts()
        await self._finish()

    async def _fail(self, code: str, message: str) -> None:
        await self._fail_with([BatchFault(code=code, message=message)])

    async def _fail_with(self, faults: list[BatchFault]) -> None:
        self._batch.errors = BatchFaults(data=faults)
        await self._end("failed")

    async def _end(self, status: Status, files: Sequence[FileRecord] = ()) -> None:
        self._ending = True
        self._batch.status = status
        setattr(self._batch, f"{status}_at", _now())
        await self._save(ended=True, files=files)
        await self._on_end(self._record.id)
        await in_thread(remove_parts, self._files, self._record, [f.path for f in files])

    async def _save(self, *, ended: bool = False, files: Sequence[FileRecord] = ()) -> None:
        """Saves the whole record, once Redis answers."""
        self._count()
        while True:
            try:
                await self._store.save(
                    self._record,
                    self._token,
                    lease_s=None if ended else LEASE_S,
                    keep_s=self._keep_s,
                    files=files,
                )
            except BrokerUnavailable as error:
                logger.warning("batch %s waits: %s", self._record.id, error)
                await asyncio.sleep(RENEW_S)
            else:
                return

    def _count(self) -> None:
        counts = _sum((self._done, self._parts.counts))
        # The last driver may have died with more lines than it had written.
        self._shown = Counts(
            total=self._batch.request_counts.total,
            completed=max(counts.completed, self._shown.completed),
            failed=max(counts.failed, self._shown.failed),
        )
        self._batch.request_counts = self._shown


def _written(line: Line, job_id: str, end: End) -> Written:
    document = line.document(job_id, end)
    return Written(encoded(document), is_failure(document))


def _read(lines: Iterable[RawLine], rules: OpenAIRules) -> list[Line]:
    return [OpenAILine(raw, fields_of(raw), rules) for raw in lines]


def _faults(found: Survey) -> Iterator[BatchFault]:
    """Why OpenAI would run none of the lines."""
    for number in sorted(found.broken | found.repeated)[:MOST_FAULTS]:
        if number in found.broken:
            message = "This line is not parseable as valid JSON."
            yield BatchFault(code="invalid_json_line", message=message, line=number)
        else:
            message = "An earlier line has this custom_id. Each line needs one of its own."
            yield BatchFault(
                code="duplicate_custom_id", message=message, line=number, param="custom_id"
            )


def _sum(counts: Iterable[Counts]) -> Counts:
    """Of what is answered: ``total`` lines."""
    each = list(counts)
    return Counts(
        total=sum(c.total for c in each),
        completed=sum(c.completed for c in each),
        failed=sum(c.failed for c in each),
    )


def _now() -> int:
    return int(time.time())
