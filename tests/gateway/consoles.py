"""A gateway whose keys know operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llorch_worker.gateway.keys import new_key
from tests.gateways import GatewayProcess, running_gateway

OPERATOR, GUEST = new_key("ops"), new_key("guest")
"""Each with its entry in the file of keys."""


@contextmanager
def console_gateway(redis_url: str, folder: Path) -> Iterator[GatewayProcess]:
    """A gateway with the two keys, whose file is ``keys.toml`` in ``folder``."""
    file = folder / "keys.toml"
    file.write_text(f"{OPERATOR[1]}operator = true\n{GUEST[1]}")
    with running_gateway(redis_url, folder, keys=file) as gateway:
        yield gateway
