"""A registry as text, in the format that the reader asks for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest


def exposition(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """The text, and its content type. ``accept`` is the header; the plain format answers one that
    cannot be understood."""
    try:
        encode, content_type = choose_encoder(accept or "")
    except (TypeError, ValueError):
        # A version that is no number.
        encode, content_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
    return encode(registry), content_type
