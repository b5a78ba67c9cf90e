"""Task messages with something wrong in them, made from a seed."""

from __future__ import annotations

import base64
import bz2
import copy
import gzip
import json
import lzma
import random
import zlib
from collections.abc import Iterator
from typing import Any

from llorch_worker.broker.messages.message import ENQUEUED_AT
from llorch_worker.contract import TASK_NAME
from tests.messages import envelope

# kombu's types, right and wrong.
TYPES = (
    *("bytes", "base64", "datetime", "date", "time", "decimal", "uuid"),
    *("unheard of", "", None, 7, [], {}, ["x"]),
)
VALUES = (
    *("x", "", None, 7, -1.5, True, [], {}, "\ud800", "1.5", "NaN"),
    *({"hex": 5}, {"hex": "x"}, {"hex": "0" * 32}, {"odd": 1}),
    *("2026-11-28", "12:00", "2026-11-28T12:00:00"),
)
ODD = (
    *(None, True, False, 0, 1, -1, 2**40, 2**70, 10**400, 1.5, -0.0, float("inf"), float("nan")),
    *("", "x", "\0", "\ud800", "ü", "x" * 300, "1"),
    *("gzip", "base64", "utf-8", "utf-16", "rot13", "hex", "yesterday"),
    *("2026-11-28T12:00:00", "2026-11-28T12:00:00+00:00"),
    *([], {}, [[]], [{}], [None], [None, None], [1, 2], ["x", "y"], [1, 2, 3]),
    *({"": None}, {"a": {"b": []}}, {"task": 5}, {"task": "x"}, [{"task": "x"}]),
)
ADDED = (
    *("odd", "self", "", "\ud800", "args", "kwargs", "task", "id", "properties", "delivery_info"),
    # Attributes and methods of Celery's request.
    *("get", "update", "execution_options", "children", "_children", "headers", "hostname"),
)
HEADERS = {
    **{"lang": "py", "task": TASK_NAME, "argsrepr": "()", "kwargsrepr": "{}", "origin": "gen@host"},
    **dict.fromkeys(
        ("shadow", "eta", "expires", "group", "group_index", "parent_id", "traceparent")
    ),
    **{"retries": 0, "timelimit": [None, None], "ignore_result": False, "replaced_task_nesting": 0},
    **{"stamped_headers": None, "stamps": {}, "compression": None, ENQUEUED_AT: 1.7e9},
    **{"llorch_tenant": None, "llorch_owner": "k", "llorch_place": None},
}
FIELDS: dict[str, Any] = {
    **{"prompt": "x", "max_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7},
    **{"stop": ["z"], "n": 1, "metadata": {"a": 1}, "logit_bias": {"1": 1}, "deadline_s": 60},
    **{"priority": "normal", "model": "toy", "tools": []},
    **dict.fromkeys(
        (
            *("tenant", "logprobs", "messages", "prompt_token_ids", "chat_template_kwargs"),
            *("structured_outputs", "response_format", "idempotency_key", "affinity_key"),
        )
    ),
}
SIGNATURE = {
    **{"task": "elsewhere.follow", "args": [], "kwargs": {}, "subtask_type": None},
    **{"options": {"queue": "elsewhere", "task_id": "follow"}, "immutable": False},
}
OPTIONS = {"callbacks": [SIGNATURE], "errbacks": [SIGNATURE], "chain": [SIGNATURE], "chord": None}
COMPRESSIONS = {
    **{"gzip": zlib.compress, "application/x-gzip": gzip.compress, "zlib": zlib.compress},
    **{
        "bzip2": bz2.compress,
        "lzma": lzma.compress,
        "brotli": zlib.compress,
        "zstd": zlib.compress,
    },
}


def malformed(seed: int, job_id: str) -> bytes:
    """A message that is wrong in some ways; the same for the same seed."""
    rng = random.Random(seed)
    options = copy.deepcopy(OPTIONS) if seed % 3 == 0 else dict.fromkeys(OPTIONS)
    document = envelope(b"", headers={**copy.deepcopy(HEADERS), "id": job_id, "root_id": job_id})
    document["body"] = [[], copy.deepcopy(FIELDS), options]
    if rng.random() < 0.1:
        _to_protocol_1(document, job_id)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _mutate(document, rng)
    if "body" in document and rng.random() < 0.95:
        body = base64.b64encode(_encoded(document, rng))
        document["body"] = (base64.b64encode(body) if rng.random() < 0.03 else body).decode()
    text = json.dumps(document)
    if rng.random() < 0.02:
        name = rng.choice(('"headers":', '"id":'))
        text = text.replace(name, f"{name} null, {name}", 1)
    sent = text.encode()
    kind = rng.random()
    if kind < 0.03:
        return sent[: rng.randrange(len(sent) + 1)]
    return _scratched(sent, rng) if kind < 0.08 else sent


def _to_protocol_1(document: dict[str, Any], job_id: str) -> None:
    args, kwargs, options = document["body"]
    document["headers"] = {}
    document["body"] = {
        **{"task": TASK_NAME, "id": job_id, "args": args, "kwargs": kwargs, "retries": 0},
        **{"eta": None, "expires": None, "utc": True, "timelimit": [None, None], "taskset": None},
        **{name: options[name] for name in ("callbacks", "errbacks", "chord")},
    }


def _mutate(document: dict[str, Any], rng: random.Random) -> None:
    part = rng.choice(("headers", "headers", "properties", "body", "body", ""))
    root = document.get(part, document)
    places = list(_places(root))
    if not places:
        return
    parent, last = rng.choice(places)
    kind = rng.random()
    if kind < 0.12 and isinstance(parent, dict):
        del parent[last]
    elif kind < 0.2 and isinstance(parent, dict):
        parent[rng.choice(ADDED)] = _odd(rng)
    elif kind < 0.25 and isinstance(parent, list):
        parent.append(_odd(rng))
    else:
        parent[last] = _odd(rng)


def _places(value: Any, levels: int = 8) -> Iterator[tuple[Any, Any]]:
    """Each list and object, with an index or a name in it."""
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for name, each in inner if levels else ():
        yield value, name
        yield from _places(each, levels - 1)


def _odd(rng: random.Random) -> Any:
    kind = rng.random()
    typed = {"__type__": rng.choice(TYPES), "__value__": rng.choice(VALUES)}
    if kind < 0.25:
        return copy.deepcopy(typed)
    if kind < 0.33:
        return copy.deepcopy(rng.choice(([typed], {"x": typed, "y": rng.choice(ODD)})))
    if kind < 0.35:
        deep: Any = "deep"
        for _ in range(rng.choice((30, 200, 600))):
            deep = [deep]
        return deep
    return copy.deepcopy(rng.choice(ODD))


def _encoded(document: dict[str, Any], rng: random.Random) -> bytes:
    body = json.dumps(document["body"]).encode()
    kind = rng.random()
    if kind < 0.03:
        return body[: rng.randrange(len(body) + 1)]
    if kind < 0.06:
        return _scratched(body, rng)
    if kind < 0.12:
        name = rng.choice(list(COMPRESSIONS))
        if isinstance(document.get("headers"), dict):
            document["headers"]["compression"] = name
        body = COMPRESSIONS[name](body)
        return _scratched(body, rng) if rng.random() < 0.5 else body
    if kind < 0.14:
        return body.decode().encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-be")))
    return body


def _scratched(content: bytes, rng: random.Random) -> bytes:
    spot = rng.randrange(len(content))
    return content[:spot] + bytes([rng.randrange(256)]) * rng.randrange(3) + content[spot + 1 :]
