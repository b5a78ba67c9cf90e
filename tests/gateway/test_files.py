"""Files through the gateway, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
import redis
import redis.asyncio
from fastapi import Response, UploadFile

from llorch_worker.broker import keys
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.gateway.files import record
from llorch_worker.gateway.files.record import FileRecord, FileRecords
from llorch_worker.gateway.files.store import FileStore
from llorch_worker.gateway.keys import Caller
from llorch_worker.gateway.routes.files import FileUpload, upload_file
from llorch_worker.gateway.settings import GatewaySettings
from tests.gateways import GatewayProcess, running_gateway
from tests.services import RedisServer, free_port


@pytest.fixture(scope="module")
def api(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def test_a_file_is_kept_shown_read_and_deleted(api: openai.OpenAI) -> None:
    content = b'{"a": "\xc3\xa9"}\n' * 3
    file = api.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.object, file.bytes, file.filename) == ("file", len(content), "in.jsonl")
    assert (file.purpose, file.status) == ("batch", "processed")
    assert api.files.retrieve(file.id) == file
    assert api.files.content(file.id).read() == content
    assert api.files.delete(file.id).deleted
    for gone in (api.files.retrieve, api.files.content, api.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(file.id)
    assert file.id not in [each.id for each in api.files.list()]


def test_an_empty_file_is_a_file(api: openai.OpenAI) -> None:
    file = api.files.create(file=("empty", b""), purpose="user_data")
    assert (file.bytes, api.files.content(file.id).read()) == (0, b"")


def test_lists_are_cut_into_pages(api: openai.OpenAI) -> None:
    made = [api.files.create(file=(f"{n}", b"x"), purpose="user_data").id for n in range(5)]
    page = api.files.list(limit=2, purpose="user_data")
    assert ([file.id for file in page.data], page.has_more) == (made[:2:-1], True)
    assert [file.id for file in api.files.list(limit=2)][:5] == made[::-1]
    oldest = api.files.list(limit=100, order="asc", after=made[1])
    assert [file.id for file in oldest.data] == made[2:]
    assert not oldest.has_more
    assert not api.files.list(purpose="batch", limit=100, after=made[0]).data
    with pytest.raises(openai.NotFoundError):
        api.files.list(after="file-none")


def test_what_is_wrong_with_an_upload_is_named(http: httpx.Client) -> None:
    def refused(**fields: str) -> str:
        answer = http.post("/v1/files", data=fields, files={"file": ("x", b"x")})
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["param"])

    assert refused(purpose="fine-tune") == "purpose"
    assert refused() == "purpose"
    missing = http.post("/v1/files", data={"purpose": "batch"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "file")


def test_a_large_file_goes_through_in_pieces(redis_server: RedisServer, tmp_path: Path) -> None:
    size = 128 * 2**20
    content = os.urandom(2**20) * (size // 2**20)
    with running_gateway(redis_server.url, tmp_path) as gateway:
        process = psutil.Process(gateway.process.pid)
        api = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
        api.files.create(file=("warm", b"x"), purpose="user_data")
        before = process.memory_info().rss
        file = api.files.create(file=("large", io.BytesIO(content)), purpose="user_data")
        digest = hashlib.sha256()
        with api.files.with_streaming_response.content(file.id) as answer:
            assert answer.headers["content-length"] == str(size)
            for block in answer.iter_bytes():
                digest.update(block)
        assert digest.digest() == hashlib.sha256(content).digest()
        assert process.memory_info().rss - before < size / 4


def test_an_upload_that_redis_does_not_record_leaves_no_bytes(tmp_path: Path) -> None:
    async def upload() -> None:
        redis_url = f"redis://127.0.0.1:{free_port()}/0"
        async with redis.asyncio.Redis.from_url(redis_url) as nobody:
            gateway: Any = SimpleNamespace(
                own=GatewaySettings(),
                file_store=FileStore(str(tmp_path)),
                files=FileRecords(nobody, redis_url, "file", FileRecord),
            )
            sent = FileUpload(file=UploadFile(io.BytesIO(b"{}"), filename="a"), purpose="batch")
            await upload_file(gateway, Caller(), sent, Response())

    with pytest.raises(BrokerUnavailable):
        asyncio.run(upload())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_uploads_leave_the_event_loops_threads_to_jobs(tmp_path: Path) -> None:
    store, go_on = FileStore(str(tmp_path)), threading.Event()

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            go_on.wait()
            return super().read(size)

    async def upload() -> list[int]:
        # More than the event loop has threads.
        uploads = [asyncio.create_task(store.copy_in(f"{n}", Slow(b"{}"))) for n in range(100)]
        try:
            await asyncio.wait_for(asyncio.to_thread(int), 60)
        finally:
            go_on.set()
        return await asyncio.gather(*uploads)

    assert asyncio.run(upload()) == [2] * 100


def remove_expired(server: RedisServer, store: FileStore, at_s: float) -> Counter[str]:
    async def remove() -> Counter[str]:
        async with redis.asyncio.from_url(server.url, decode_responses=True) as client:
            records = FileRecords(client, server.url, "file", FileRecord)
            return await records.remove_expired(store, at_s)

    return asyncio.run(remove())


def test_a_file_goes_when_it_expires(
    api: openai.OpenAI, gateway: GatewayProcess, redis_server: RedisServer
) -> None:
    kept = api.files.create(file=("a", b"x"), purpose="user_data")
    assert kept.expires_at is None
    file = api.files.create(
        file=("b", b"x"),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    assert api.files.retrieve(file.id) == file
    assert file in api.files.list(limit=2).data

    store = FileStore(str(gateway.log.parent / "files"))
    assert not remove_expired(redis_server, store, file.expires_at - 1)
    assert api.files.content(file.id).read() == b"x"
    assert not remove_expired(redis_server, store, file.expires_at)
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(file.id)
    assert not (gateway.log.parent / "files" / "uploads" / file.id).exists()
    assert api.files.content(kept.id).read() == b"x"


class OfAnObjectStore(Exception):
    """Those of some object stores are no ``OSError``."""


class Refusing(FileStore):
    """``removal``: what the removal of each path raises. Permissions do not bind root."""

    removal: Mapping[str, Exception]

    def remove(self, path: str) -> None:
        if path in self.removal:
            raise self.removal[path]
        super().remove(path)


def test_a_file_that_cannot_be_removed_keeps_no_later_one(
    api: openai.OpenAI,
    gateway: GatewayProcess,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So the kept ones fill a page of what is due.
    monkeypatch.setattr(record, "READ_AT_ONCE", 2)
    made = [
        api.files.create(
            file=("b", b"x"),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600 + 100 * number},
        )
        for number in range(4)
    ]
    first, second, damaged, last = (file.id for file in made)
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset(keys.gateway_document(damaged), "document", "{}")
    store = Refusing(str(gateway.log.parent / "files"))
    store.removal = {
        f"uploads/{first}": PermissionError(),
        f"uploads/{second}": OfAnObjectStore(),
    }
    ends_s = made[-1].expires_at
    assert ends_s is not None
    assert remove_expired(redis_server, store, ends_s) == {
        "PermissionError": 1,
        "OfAnObjectStore": 1,
        "ValidationError": 1,
    }
    for kept in (first, second):
        assert api.files.content(kept).read() == b"x"
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(last)
    store.removal = {}
    assert remove_expired(redis_server, store, ends_s) == {"ValidationError": 1}
    with redis.Redis.from_url(redis_server.url) as client:
        client.delete(keys.gateway_document(damaged))
    assert not remove_expired(redis_server, store, ends_s)


def test_nobody_sees_a_file_that_has_expired_but_is_not_removed_yet(
    api: openai.OpenAI, redis_server: RedisServer
) -> None:
    after = {"anchor": "created_at", "seconds": 3600}
    file = api.files.create(file=("b", b"x"), purpose="user_data", expires_after=after)  # type: ignore[arg-type]
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        document = str(client.hget(keys.gateway_document(file.id), "document"))
        record = FileRecord.model_validate_json(document).model_copy(update={"expires_at": 1})
        client.hset(keys.gateway_document(file.id), "document", record.model_dump_json())
    for gone in (api.files.retrieve, api.files.content, api.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(file.id)
    assert file.id not in [each.id for each in api.files.list(limit=100)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        (
            {"expires_after[anchor]": "now", "expires_after[seconds]": "3600"},
            "expires_after[anchor]",
        ),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
            "expires_after[seconds]",
        ),
    ],
)
def test_an_expiry_that_cannot_be_kept_is_refused(
    http: httpx.Client, fields: dict[str, str], param: str
) -> None:
    upload = {"purpose": "batch", **fields}
    answer = http.post("/v1/files", data=upload, files={"file": ("x", b"x")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_other_fields_of_an_upload_are_named(
    http: httpx.Client, redis_server: RedisServer, tmp_path: Path
) -> None:
    upload = {"purpose": "batch", "chunking": "auto"}
    answer = http.post("/v1/files", data=upload, files={"file": ("x", b"x")})
    assert (answer.status_code, answer.headers["x-llorch-ignored"]) == (200, "chunking")
    with running_gateway(redis_server.url, tmp_path, unknown_fields="refuse") as strict:
        answer = httpx.post(f"{strict.url}/v1/files", data=upload, files={"file": ("x", b"x")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chunking")


def test_an_unknown_kind_of_store_is_named() -> None:
    with pytest.raises(CommandError, match=r"LLORCH_GATEWAY_FILES: .*nosuch"):
        FileStore("nosuch://bucket")


def test_a_store_may_be_an_object_store() -> None:
    store = FileStore("memory://bucket/files")
    assert store.write("batches/1/a.output", [b"one ", b"two"]) == 7
    with store.open("batches/1/a.output") as file:
        assert file.read() == b"one two"
    assert store.names("batches/1") == ["batches/1/a.output"]

    def breaking() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        store.write("batches/1/b.output", breaking())
    assert store.names("batches/1") == ["batches/1/a.output"]
    store.remove("batches/1/a.output")
    store.remove("batches/1/a.output")
    assert store.names("batches/1") == []
    assert store.names("batches/2") == []
