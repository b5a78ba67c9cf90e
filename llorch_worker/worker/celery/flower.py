"""What Flower shows of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llorch_worker.contract.quantities import human_bytes


def show_queues_of_later_workers() -> None:
    """Has the Broker page, and the API of the same figures, ask the workers for their queues.
    Flower itself asks when it starts, and when somebody opens its page of workers."""
    from flower.api.tasks import GetQueueLengths
    from flower.views.broker import BrokerView

    for handler in (BrokerView, GetQueueLengths):
        handler.get = _asking_first(handler.get)


def _asking_first(get: Any) -> Any:
    from tornado.web import authenticated

    async def ask_and_get(view: Any) -> None:
        await view.application.update_workers()
        await get(view)

    return authenticated(ask_and_get)


def shown_figures(stats: Mapping[str, Any]) -> dict[str, list[str]]:
    """The engine's figures on the worker's page: label to text, from fields of ``EngineStats``.

    Each text is a list, because Flower capitalises a string and turns its ``-`` and ``_`` into
    spaces, but shows the items of a list as they are.
    """
    blocks = stats["kv_blocks_total"]
    used = blocks - stats["kv_blocks_free"]
    deaths = [
        f"{stats['deaths']:,}",
        *([f"the last: {stats['last_death']}"] * bool(stats["deaths"])),
    ]
    return {
        "engine": [stats["away"] or "serves"],
        "engine deaths": deaths,
        "model": [stats["model"]],
        "device": [stats["device"]],
        "dtype": [stats["dtype"]],
        "sequences": [
            f"{stats['running']} running",
            f"{stats['waiting']} waiting",
            f"at most {stats['max_sequences']}",
        ],
        "context": [f"{stats['max_context']:,} tokens"],
        "speed": [f"{stats['tokens_per_s']:,.1f} tokens/s"],
        "KV cache": [f"{used / max(blocks, 1):.1%} used", f"{used:,} of {blocks:,} blocks"],
        "prompt tokens": [
            f"{stats['prompt_tokens_total']:,} computed",
            f"{stats['cached_tokens_total']:,} found in the KV cache",
        ],
        **({"does not promise": list(stats["weakens"])} if stats.get("weakens") else {}),
        "memory": _by_part(stats["bytes"]),
        "memory planned": _by_part(stats["planned_bytes"]),
        "memory measured": _by_part(stats["measured_bytes"]),
    }


def _by_part(sizes: Mapping[str, int]) -> list[str]:
    return [f"{part} {human_bytes(size)}" for part, size in sizes.items()]
