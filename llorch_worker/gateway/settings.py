"""The settings of a gateway, beside those that it shares with workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from llorch_worker.broker.connections.url import in_brackets
from llorch_worker.contract import shown
from llorch_worker.gateway.webhook_secret import WebhookSecret
from llorch_worker.settings import Bytes, Seconds, WholeSeconds


def _files_folder(given: Any) -> Any:
    if given:
        return given
    try:
        return str(Path.home() / ".llorch" / "files")
    except RuntimeError:
        raise PydanticCustomError(
            "files", "this user has no home folder; set LLORCH_GATEWAY_FILES to a folder"
        ) from None


class GatewaySettings(BaseSettings):
    """One frozen object; each field is the environment variable ``LLORCH_GATEWAY_<FIELD>``."""

    model_config = SettingsConfigDict(
        env_prefix="LLORCH_GATEWAY_",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
    )

    host: str = "127.0.0.1"
    """The address to listen on. An address beyond loopback needs keys."""
    port: int = Field(8080, ge=0, le=65535)
    """The port to listen on."""
    keys: Path | None = None
    """The file of bearer keys; ``llorch gateway-key`` makes one. Without it, everyone on this
    machine may call."""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Origins, comma-separated, whose pages may call the gateway; by default none."""
    max_body_bytes: Bytes = 8 * 2**20
    """The largest body of a request, files excepted."""
    max_file_bytes: Bytes = 512 * 2**20
    """The largest file. Sizes are in bytes, or have a unit: ``512MiB``, ``8GB``."""
    default_max_tokens: int = Field(4096, ge=1)
    """The most tokens of an answer whose request names no maximum, where the endpoint has no
    default of its own."""
    max_tokens: int | None = Field(None, ge=1)
    """The most tokens of an answer, of which more are cut to it; by default what the context holds.
    What a job itself names is not cut."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What happens to fields of a request that nobody here knows. Ignored ones are named in the
    header ``x-llorch-ignored``."""
    body_timeout_s: Seconds = Field(30.0, gt=0)
    """How long a client may pause while it sends a body, which must come at 16 KiB/s on average."""
    header_timeout_s: Seconds = Field(20.0, gt=0)
    """How long a client may need for the header of a request, from its connection on."""
    keep_alive_s: WholeSeconds = 90
    """How long a connection stays open after an answer: longer than those of a proxy in front."""
    waiting_connections: int = Field(1000, ge=1)
    """Most connections of one address without a request; one more closes the oldest of them."""
    files: Annotated[str, BeforeValidator(_files_folder)] = Field("", validate_default=True)
    """Where files are kept: a folder that all gateways share, or an fsspec URL such as s3://..."""
    response_ttl_s: WholeSeconds = 24 * 3600
    """How long responses, and the files that batches wrote, are kept. A response also needs its
    result (LLORCH_RESULT_TTL_S)."""
    batch_window: int = Field(256, ge=1)
    """Most lines of one batch in the queue at a time."""
    private_callbacks: bool = False
    """Whether webhooks may go to private, loopback and link-local addresses."""
    webhook_secret: WebhookSecret | None = None
    """Signs the webhooks of keys without a secret of their own: ``whsec_`` and base64."""
    webhook_retry_s: Seconds = Field(5.0, gt=0)
    """The pause after a webhook's first failed attempt. It doubles with each, up to an hour."""
    webhook_give_up_s: Seconds = Field(24 * 3600, gt=0)
    """How long a webhook is tried before it is kept as a dead letter."""

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(_origin(origin.strip()) for origin in value.split(",") if origin.strip())


def _origin(given: str) -> str:
    """As browsers send it: in small letters, without a final slash or the scheme's own port."""
    if given in ("*", "null"):
        return given
    try:
        parts = urlsplit(given)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:
        host, port = "", None
    more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if more or not parts.scheme or not re.fullmatch(r"[\w.:-]+", host):
        raise PydanticCustomError(
            "origin",
            "'{given}' is no origin; write it as browsers send it, such as https://app.example or "
            "http://localhost:3000, without a path, or * for all",
            {"given": shown(given)},
        )
    host = in_brackets(host)
    is_usual = port in (None, {"http": 80, "https": 443}.get(parts.scheme))
    return f"{parts.scheme}://{host}" if is_usual else f"{parts.scheme}://{host}:{port}"
