"""What a stack starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llorch_worker.settings import Settings


@dataclass(frozen=True)
class Plan:
    """The programs to start."""

    settings: Settings
    models: tuple[Settings, ...] = field(default=(), kw_only=True)
    """The settings of several models, which the workers load in turn; empty if all load that of
    ``settings``."""
    workers: tuple[tuple[str, str], ...]
    """The (name, device) of each worker."""
    redis_url: str | None
    """None starts a Redis that ends with the stack."""
    worker_environment: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """Variables of the workers, besides those of the settings."""
    redis_port: int | None = field(default=None, kw_only=True)
    """The first port to try for that Redis; None for any free one."""
    flower_port: int | None
    """None starts no Flower."""
    flower_port_asked: bool = False
    """Whether the user chose the port; otherwise Flower may take another one."""
    flower_login: str | None = None
    gateway_port: int | None = None
    """None starts no gateway."""
    gateway_port_asked: bool = False
