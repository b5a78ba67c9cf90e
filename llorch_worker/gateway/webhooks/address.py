"""Which URLs and addresses a webhook may go to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import SplitResult, urlsplit

import httpcore
from httpcore import AnyIOBackend, AsyncNetworkBackend, AsyncNetworkStream, ConnectError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# An IPv4 address is part of these, and a router may unpack it.
_WRAPPINGS = tuple(
    ipaddress.ip_network(each)
    for each in (
        "::ffff:0:0/96",
        "::ffff:0:0:0/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2002::/16",
        "2001::/32",
        "::/96",
    )
)
RESOLVER_THREADS = 8
"""Of their own, because a name server may be slow."""


def url_fault(url: str, *, private: bool) -> str | None:
    """The rule that ``url`` breaks, as far as that is known without a name server.

    ``private``: whether it may name a private address.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "must be a URL"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "must be an http or https URL with a host"
    if not url.isascii() or not url.isprintable() or " " in url:
        return "must be ASCII without spaces"
    if parts.username is not None or parts.password is not None:
        return "must not contain a user or a password"
    if not private and _is_literally_private(parts):
        return "must not name a private, loopback or link-local address"
    return None


def _is_literally_private(parts: SplitResult) -> bool:
    host = (parts.hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return not is_public(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        pass
    try:
        # Resolvers also read 127.1, 0x7f000001 and 2130706433.
        return not is_public(ipaddress.ip_address(socket.inet_aton(host)))
    except OSError:
        return False


def is_public(address: Address) -> bool:
    """Whether the address belongs to the public internet, and to one host."""
    wrapped = any(address in network for network in _WRAPPINGS)
    site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not (wrapped or site_local or address.is_multicast)


class PinnedBackend(AsyncNetworkBackend):
    """Connects to public addresses only. A name is resolved once, and the connection goes to what
    was checked: a name server that answers differently the next time gains nothing."""

    def __init__(self, *, private: bool) -> None:
        self._private = private
        self._backend = AnyIOBackend()
        self._resolvers = ThreadPoolExecutor(RESOLVER_THREADS, "llorch-resolver")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        """Raises ``ConnectError``; ``ForbiddenAddress`` if one of the host's addresses is not
        public."""
        failure: Exception = ConnectError("the host has no address")
        for address in await self._resolve(host, port):
            try:
                return await self._backend.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _resolve(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._resolvers, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError):
            raise ConnectError("the host cannot be resolved") from None
        # A link-local address has a zone.
        addresses = [str(each[4][0]) for each in found]
        if not self._private:
            for address in addresses:
                if not is_public(ipaddress.ip_address(address.partition("%")[0])):
                    raise ForbiddenAddress("the host has a private address")
        return addresses


class ForbiddenAddress(ConnectError):
    """A webhook would go to an address that is not public."""
