"""Which server answers, and what it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llorch_worker.contract import ModelLoadFailed, shown
from llorch_worker.servers.bodies import Served
from llorch_worker.servers.connection import (
    UNREACHED,
    Connection,
    Refusal,
    ServerAway,
    WrongAnswer,
)
from llorch_worker.servers.fields import Kind

PROBE_S: Final = 10.0
MOST_SLOTS: Final = 1024
"""Each that is taken is a thread of the worker."""
_OWNERS: Final[Mapping[str, Kind]] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama-server",
}
_THINKS: Final = ("think", "reasoning", "<|channel|>")
"""What a chat template has whose answers may begin with a thought."""


@dataclass(frozen=True)
class Found:
    served: Served
    identity: tuple[str, ...]
    """The server with its version, and what it says of the model."""
    slots: int | None
    """How many requests it computes at once, if it says so."""
    weakens: tuple[str, ...]
    """See :attr:`.ModelFacts.weakens`."""


async def probe(connection: Connection, model: str) -> Found:
    """What is at the other end.

    Raises:
        ServerAway, AnswerCut: nothing yet.
        ModelLoadFailed: no such server, or another model.
    """
    card = _card(connection.url, await _ask(connection, "/v1/models"), model)
    kind = _OWNERS.get(str(card.get("owned_by")), "another server")
    await check_health(connection, kind, PROBE_S)
    meta = card.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    slots: object = None
    version: object = None
    context, parses = card.get("max_model_len"), False
    if kind == "llama-server":
        props = await _ask(connection, "/props")
        settings = props.get("default_generation_settings")
        context = settings.get("n_ctx") if isinstance(settings, dict) else None
        slots, version = props.get("total_slots"), props.get("build_info")
        template = str(props.get("chat_template")).lower()
        parses = any(word in template for word in _THINKS)
    elif kind == "SGLang":
        info = await _ask(connection, "/get_server_info")
        slots, version = info.get("max_running_requests"), info.get("version")
    elif kind == "vLLM":
        version = (await _ask(connection, "/version")).get("version")
    facts = [f"{name}={meta.get(name)}" for name in ("n_params", "n_vocab", "size", "ftype")]
    return Found(
        Served(kind, model, _count(context) or 0, parses),
        (f"{kind} {shown(str(version or ''), 40)}".strip(), model, str(card.get("root")), *facts),
        _count(slots, MOST_SLOTS),
        _weakens(kind, parses=parses),
    )


async def check_health(connection: Connection, kind: Kind, timeout_s: float) -> None:
    """Raises ServerAway if the server says that it is ill, as vLLM does whose engine has died, and
    AnswerCut if it says nothing.

    Another server is asked for its models: for its health a LiteLLM proxy has each of them answer,
    which is paid for."""
    path = "/v1/models" if kind == "another server" else "/health"
    try:
        await connection.ask(path, timeout_s=timeout_s)
    except Refusal as refusal:
        if refusal.status >= 500:
            ended = refusal.status not in UNREACHED
            raise ServerAway(f"{refusal.shown()} at {path}", ended=ended) from None
    except WrongAnswer:
        pass  # any word will do


async def _ask(connection: Connection, path: str) -> dict[str, Any]:
    try:
        answer = await connection.ask(path, timeout_s=PROBE_S)
    except Refusal as refusal:
        if refusal.status in (401, 403):
            what = "refuses the key; LLORCH_ENGINE_KEY or the file of LLORCH_ENGINE_KEY_FILE has it"
            raise ModelLoadFailed(f"the server at {connection.url} {what}") from None
        if refusal.status >= 500 or refusal.status == 429:
            raise ServerAway(refusal.shown()) from None
        if path != "/v1/models":
            return {}
        raise _no_api(connection.url, f"HTTP {refusal.status} at {path}") from None
    except WrongAnswer as error:
        raise _no_api(connection.url, error.message) from None
    if not isinstance(answer, dict):
        raise _no_api(connection.url, f"no object at {path}")
    return answer


def _card(url: str, models: dict[str, Any], model: str) -> dict[str, Any]:
    """What the server says of the model."""
    data = models.get("data")
    cards = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    if not cards:
        raise _no_api(url, "no list of models at /v1/models")
    names = [shown(str(card.get("id"))) for card in cards]
    found = next((c for c in cards if model == c.get("id") or model in _aliases(c)), None)
    if found is None:
        served = ", ".join(names)
        raise ModelLoadFailed(f"the server at {url} serves {served}, and not {shown(model)}")
    name = found.get("parent")
    if found.get("max_model_len") is None and name is not None:
        # vLLM says of a LoRA adapter only which model it belongs to.
        parent: dict[str, Any] = next((card for card in cards if card.get("id") == name), {})
        return found | {"max_model_len": parent.get("max_model_len")}
    return found


def _no_api(url: str, what: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"no server with OpenAI's API is at {url}: {what}; the URL must end where /v1/models begins"
    )


def _aliases(card: dict[str, Any]) -> Sequence[object]:
    aliases = card.get("aliases")
    return aliases if isinstance(aliases, list) else ()


def _count(value: object, most: int = 2**31 - 1) -> int | None:
    return min(value, most) if isinstance(value, int) and value > 0 else None


def _weakens(kind: Kind, *, parses: bool) -> tuple[str, ...]:
    again = {
        "vLLM": "several choices, JSON, grammars, penalties, tools and thoughts",
        "SGLang": "chats, several choices, JSON, grammars and penalties",
        "llama-server": "several choices, JSON, grammars, penalties, characters of several tokens "
        + ("and chats" if parses else "and chats with tools"),
        "another server": "all texts, which have no ids of tokens",
    }[kind]
    goes_on = () if kind == "another server" else ("texts that go on after a death may differ",)
    return (*goes_on, f"begin again after a death, which their streams say: {again}")
