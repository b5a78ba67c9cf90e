"""HTTP with a server, of which nothing is trusted: neither sizes nor forms nor ends."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from llorch_worker.contract import LlorchError, printable
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.servers.gathering import GatheringSelector

BUSY: Final = (429, 503)
"""What a server answers that has no room now."""
UNREACHED: Final = (502, 504)
"""What a proxy answers that reaches no server."""
CONNECT_S: Final = 5.0
KEEP_S: Final = 0.1
"""How long a connection may be used again: at once, such as for the answer after a question about
its tokens. One that the server closes as it idles would look like a cut answer."""
KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""Of a connection on which nothing comes: seconds until it is probed, and between two probes, and
how many may be lost."""
ANSWER_S: Final = 60.0
"""How long a question about tokens may take."""
MOST_ANSWER_BYTES: Final = 32 * 2**20
"""Of an answer that is one document, such as the ids of a long text."""
MOST_ERROR_BYTES: Final = 2**16
MOST_EVENT_BYTES: Final = 2**20
MOST_SHOWN: Final = 300
MOST_COMPARED: Final = 2**18
"""Characters of a text that is looked for in an error; more take too long."""
_QUOTED: Final = 12
"""Characters in a row that an error may not share with a request."""


class ServerAway(Exception):
    """No server answers. ``ended``: its engine has, as nobody listens there or it says so."""

    def __init__(self, reason: str, *, ended: bool = False) -> None:
        self.ended = ended
        super().__init__(reason)


class AnswerCut(Exception):
    """An answer broke off. The message says how."""


class WrongAnswer(LlorchError):
    """What came is not of this API."""

    code = "INTERNAL"
    retriable = True


class Refusal(Exception):
    """The server answered with an error, or amid an answer. ``said``: its words, which may quote
    the request."""

    def __init__(self, status: int, error: object) -> None:
        error = error.get("error", error) if isinstance(error, dict) else error
        fields = error if isinstance(error, dict) else {"message": error}
        code = fields.get("code")
        self.status = status or (code if isinstance(code, int) else 0)
        self.type = str(fields.get("type") or "")
        self.said = printable(str(fields.get("message") or fields.get("detail") or ""))
        super().__init__(f"HTTP {self.status}")

    @property
    def is_for_context(self) -> bool:
        said = self.said.lower()
        return self.type == "exceed_context_size_error" or (
            self.status == 400 and ("context length" in said or "max_model_len" in said)
        )

    def shown(self, texts: Iterable[str] = ()) -> str:
        """The error in a few words, which share none with ``texts``."""
        said = self.said[:MOST_SHOWN]
        if not said or any(_quotes(said, printable(text)) for text in texts):
            said = f"a message of {len(self.said)} characters" if said else "no message"
        return f"HTTP {self.status}: {said}" if self.status else said


def _quotes(said: str, text: str) -> bool:
    if len(text) > MOST_COMPARED:
        return True
    size = min(_QUOTED, len(text))
    return (
        any(said[at : at + size] in text for at in range(len(said) - size + 1)) if size else False
    )


class Connection:
    """Belongs to one event loop."""

    def __init__(self, url: str, key: str | None, selector: GatheringSelector) -> None:
        """``url``: with or without ``/v1``. ``selector``: of the event loop."""
        self.url = url
        self.selector = selector
        self._root = url.removesuffix("/v1")
        headers = {"Accept-Encoding": "identity"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_S, socket_factory=_probed_socket
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=headers,
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(
        self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = ANSWER_S
    ) -> Any:
        """The document at ``path``, or what it answers to ``body``.

        Raises ServerAway, AnswerCut, Refusal, WrongAnswer.
        """
        async with self._open(path, body, timeout_s) as response:
            async with _told():
                data = await _read(response, MOST_ANSWER_BYTES)
            try:
                return json.loads(data) if data.strip() else None
            except (ValueError, RecursionError):
                raise WrongAnswer(f"the server's answer at {path} is no JSON") from None

    async def stream(
        self, path: str, body: dict[str, Any], *, most_bytes: int, silent_s: float
    ) -> AsyncGenerator[bytes, None]:
        """The data of each event, until the answer ends; leaving it early closes the request.

        After the first event, ``silent_s`` without a byte cut it off. Before it, the prompt and the
        server's queue may take their time. Raises as :meth:`ask`, WrongAnswer also for more than
        ``most_bytes``.
        """
        async with self._open(path, body, None) as response:
            if response.content_type != "text/event-stream":
                kind = printable(response.content_type)[:80]
                raise WrongAnswer(f"the server answered with {kind} in place of events")
            rest, read, has_begun = b"", 0, False
            async with _told(), asyncio.timeout(None) as silence:
                while data := await response.content.readany():
                    read += len(data)
                    lines = (rest + data).split(b"\n")
                    rest = lines.pop()
                    if read > most_bytes or len(rest) > MOST_EVENT_BYTES:
                        size = human_bytes(most_bytes if read > most_bytes else MOST_EVENT_BYTES)
                        raise WrongAnswer(
                            f"the server sent more than {size} for one answer or event"
                        )
                    for line in lines:
                        if line.startswith(b"data:"):
                            event = line[5:].strip()
                            if event == b"[DONE]":
                                return
                            if event:
                                has_begun = True
                                yield event
                        elif line.startswith(b"error:"):
                            raise Refusal(0, _document(line[6:]))
                    until_s = asyncio.get_running_loop().time() + silent_s
                    if has_begun and until_s > (silence.when() or 0.0):
                        silence.reschedule(until_s + 1)  # most tokens set no timer

    @asynccontextmanager
    async def _open(
        self, path: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with status 200, closed with its connection."""
        self.selector.hurry()
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        async with _told():
            response = await self._session.request(
                "GET" if body is None else "POST",
                self._root + path,
                json=body,
                timeout=timeout,
                allow_redirects=False,
            )
        try:
            if response.status != 200:
                async with _told():
                    raise Refusal(
                        response.status, _document(await _read(response, MOST_ERROR_BYTES))
                    )
            yield response
        finally:
            response.close()


def _probed_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that ends with a peer that vanishes: before its first event an answer may be silent
    for as long as it likes, and nothing else would tell one that never comes."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE:
        if (option := getattr(socket, name, None)) is not None:  # not on every platform
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > most_bytes:
            raise WrongAnswer(f"the server's answer is larger than {human_bytes(most_bytes)}")
    return b"".join(parts)


def _document(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode(errors="replace")[:MOST_SHOWN]


class _told:  # noqa: N801 - used like a function
    """Says what an error of the network means."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        match error:
            case aiohttp.ClientSSLError():
                raise WrongAnswer(f"no TLS as it should be: {type(error).__name__}") from None
            case aiohttp.ClientConnectorError():
                refused = isinstance(error.os_error, ConnectionRefusedError)
                code = error.os_error.errno
                reason = os.strerror(code) if code and code > 0 else type(error).__name__
                raise ServerAway(reason.lower(), ended=refused) from None
            case aiohttp.ServerTimeoutError() if "connect" in str(error).lower():
                raise ServerAway(f"no connection within {CONNECT_S:.0f} s") from None
            case TimeoutError():
                raise AnswerCut("the server sent nothing for too long") from None
            case aiohttp.ClientConnectionError() | ConnectionError():
                raise AnswerCut("the server closed the connection") from None
            case aiohttp.ClientPayloadError():
                raise AnswerCut("the server's answer broke off") from None
            case aiohttp.ClientError():
                raise WrongAnswer(f"the server sent no HTTP: {type(error).__name__}") from None
