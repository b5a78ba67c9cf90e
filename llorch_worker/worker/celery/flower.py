"""What Flower shows of a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llorch_worker.broker import keys
from llorch_worker.broker.queues import is_high, is_job_queue, model_of
from llorch_worker.contract.quantities import human_bytes


def show_all_queues() -> None:
    """Has the Broker page, and the API of the same figures, ask the workers for their queues, and
    count what waits for them outside of kombu's lists. Flower itself asks when it starts, and when
    somebody opens its page of workers."""
    from flower.api.tasks import GetQueueLengths
    from flower.utils.broker import RedisBase
    from flower.views.broker import BrokerView

    for handler in (BrokerView, GetQueueLengths):
        handler.get = _asking_first(handler.get)
    RedisBase.queues = _counting_all(RedisBase.queues)


def _asking_first(get: Any) -> Any:
    from tornado.web import authenticated

    async def ask_and_get(view: Any) -> None:
        await view.application.update_workers()
        await get(view)

    return authenticated(ask_and_get)


def _counting_all(queues: Any) -> Any:
    async def count(broker: Any, names: Iterable[str]) -> list[dict[str, Any]]:
        names = [*names]
        ours = [name for name in names if is_job_queue(name)]
        async with broker.redis.pipeline(transaction=False) as pipe:
            for name in ours:
                first, last = (0, 1) if is_high(name) else (1, 3)
                scores = (keys.SCORES_A_CLASS * first, f"({keys.SCORES_A_CLASS * last}")
                pipe.zcount(keys.waiting(model_of(name)), *scores)
            waiting = dict(zip(ours, await pipe.execute(), strict=True))
        # It closes the connection.
        found: list[dict[str, Any]] = await queues(broker, names)
        return [
            each | {"messages": each["messages"] + waiting.get(each["name"], 0)} for each in found
        ]

    return count


def shown_figures(engines: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """The figures of a worker's engines, by model, on its page: label to text. If it keeps several,
    their labels name the model."""
    if len(engines) == 1:
        [only] = engines.values()
        return _figures(only)
    return {
        f"{model}: {label}": texts
        for model, stats in engines.items()
        for label, texts in _figures(stats).items()
    }


def _figures(stats: Mapping[str, Any]) -> dict[str, list[str]]:
    """One engine's, from fields of ``EngineStats``.

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
        **({"reload": [stats["reload"]]} if stats.get("reload") else {}),
        "engine deaths": deaths,
        "model": [stats["model"]],
        **({"models": list(stats["models"])} if stats.get("models") else {}),
        **(
            {"set aside": [f"{name}: {reason}" for name, reason in stats["set_aside"].items()]}
            if stats.get("set_aside")
            else {}
        ),
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
