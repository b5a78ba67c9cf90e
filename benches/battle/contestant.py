"""The contestants, and how to start their workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from llorch_worker.broker.queues import normal_queue

MODEL = "toy"
QUEUE = normal_queue(MODEL)
OURS = "llorch"
HOST = "battle"


@dataclass(frozen=True)
class Contestant:
    """A name, and the arguments of ``celery`` that start its workers."""

    name: str
    app: str
    options: tuple[str, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)


def ours(max_sequences: int, step_ms: float) -> Contestant:
    return Contestant(
        OURS,
        "tests.toy_app",
        settings={
            "model_name": MODEL,
            "max_sequences": max_sequences,
            "TOY_STEP_MS": step_ms,
        },
    )


def stock(max_sequences: int, step_ms: float, pool: str) -> Contestant:
    options = ("-P", pool, "-c", str(max_sequences), "-Q", QUEUE)
    return Contestant(
        f"stock {pool}", "benches.battle.stock_app", options, {"TOY_STEP_MS": step_ms}
    )
