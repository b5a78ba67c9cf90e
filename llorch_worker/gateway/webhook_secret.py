"""The secrets that sign webhooks, as Standard Webhooks defines them."""

from __future__ import annotations

import base64
import secrets
from typing import Annotated

from pydantic import AfterValidator, SecretStr

SECRET_PREFIX = "whsec_"
LEAST_BYTES, MOST_BYTES = 24, 64


def new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def _checked(secret: SecretStr) -> SecretStr:
    """Raises ``ValueError``, without the secret, unless it is one."""
    text = secret.get_secret_value()
    try:
        key = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not text.startswith(SECRET_PREFIX) or not LEAST_BYTES <= len(key) <= MOST_BYTES:
        raise ValueError(
            f"must be {SECRET_PREFIX} and {LEAST_BYTES} to {MOST_BYTES} bytes as base64"
        )
    return secret


WebhookSecret = Annotated[SecretStr, AfterValidator(_checked)]
"""A setting that holds one."""
