"""The fields of a request as command-line options of ``generate`` and ``submit``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llorch_worker.cli.options import with_options
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.contract.generation_config import with_generation_config
from llorch_worker.settings import Settings


def _option(kind: Any, *names: str, help: str) -> Any:
    # The contract checks ranges and reports all errors at once.
    return Annotated[kind | None, typer.Option(*names, help=help, rich_help_panel="Request")]


# Field of GenerationRequest -> option; its default is in brackets. The prompt's shape comes last.
_OPTIONS: dict[str, Any] = {
    "max_tokens": _option(int, "--max-tokens", help="Tokens to generate [256]."),
    "min_tokens": _option(int, "--min-tokens", help="Tokens before the text may end [0]."),
    "temperature": _option(
        float, "--temperature", "-t", help="0 (greedy) to 2 [the model's or 0.7]."
    ),
    "top_p": _option(
        float, "--top-p", help="Probability mass to sample from, up to 1 [the model's or 0.95]."
    ),
    "top_k": _option(int, "--top-k", help="Sample from this many likeliest tokens; 0: all [0]."),
    "min_p": _option(float, "--min-p", help="Lowest probability, relative to the top token's [0]."),
    "presence_penalty": _option(float, "--presence-penalty", help="-2 to 2 [0]."),
    "frequency_penalty": _option(float, "--frequency-penalty", help="-2 to 2 [0]."),
    "repetition_penalty": _option(float, "--repetition-penalty", help="Above 0, up to 10 [1.0]."),
    "seed": _option(int, "--seed", help="The same seed gives the same tokens [random]."),
    "stop": _option(list[str], "--stop", help="Stop before this text; repeatable."),
    "n": _option(int, "-n", "--choices", help="Number of texts, 1 to 16 [1]."),
    "ignore_eos": _option(bool, "--ignore-eos", help="Continue after the end token."),
    "logprobs": _option(
        int, "--logprobs", help="Log probabilities, with 0 to 20 alternatives a token."
    ),
    "prompt_logprobs": _option(int, "--prompt-logprobs", help="The same for the prompt's tokens."),
    "deadline_s": _option(
        float, "--deadline-s", help="Seconds after which the job ends with what it has."
    ),
    "chat": _option(bool, "--chat", help="Send the prompt as a chat message of the user."),
    "system": _option(str, "--system", help="System message; implies --chat."),
}


CONVERSATION_FIELDS = {
    name: option
    for name, option in _OPTIONS.items()
    if name not in ("n", "logprobs", "prompt_logprobs", "chat", "system")
} | {"max_tokens": _option(int, "--max-tokens", help="Tokens of an answer [4096, or what fits].")}
"""The fields of requests for one answer after the other."""


def conversation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """As :func:`request_options`, without what makes no sense of a turn."""
    return with_options("fields", CONVERSATION_FIELDS, dict)(command)


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` these options; its parameter ``fields`` receives the given ones."""
    return with_options("fields", _OPTIONS, dict)(command)


def request_fields(prompt: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    """``prompt`` (``-`` reads stdin) and options as the keyword arguments of a request."""
    fields = dict(fields)
    chat, system = fields.pop("chat", False), fields.pop("system", None)
    if prompt == "-":
        prompt = read_text("-")
    if not (chat or system):
        return {"prompt": prompt, **fields}
    messages = [{"role": "system", "content": system}] if system else []
    return {"messages": [*messages, {"role": "user", "content": prompt}], **fields}


def read_text(path: str) -> str:
    """The content of the UTF-8 file ``path``; ``-`` is stdin."""
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        where = "stdin" if path == "-" else path
        raise usage_error(
            f"{where} is not UTF-8 text (byte {error.start + 1}): convert it, for example with "
            "iconv"
        ) from None


_SAMPLING = {"temperature": 0.7, "top_p": 0.95}
"""What the commands take where neither the request nor the model's makers say how to sample: small
models ramble at 1.0."""


def with_sampling(
    request: GenerationRequest, config: Mapping[str, int | float], settings: Settings
) -> tuple[GenerationRequest, str]:
    """``request`` with all that it does not name about sampling; and what that is, for people."""
    if settings.generation_config == "none":
        config = {}
    request = with_generation_config(request, config)
    greedy = "temperature" in request.model_fields_set and request.temperature == 0
    own = {} if greedy or _SAMPLING.keys() & config.keys() else _SAMPLING
    own = {name: value for name, value in own.items() if name not in request.model_fields_set}
    # With what it names of them: else that would seem not to count.
    used = {name: own.get(name, getattr(request, name)) for name in _SAMPLING} if own else {}
    told = [f"sampling: {_listed(used)}"] if used else []
    if request.taken_config:
        told.append(f"sampling as the model's makers set it: {_listed(request.taken_config)}")
    return request.model_copy(update=own) if own else request, "; ".join(told)


def _listed(values: Mapping[str, int | float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
