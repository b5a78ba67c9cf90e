"""The fields of a request as command-line options: one table for ``generate`` and ``submit``."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from llorch_worker.contract import Fault, GenerationRequest, InvalidRequest, describe
from llorch_worker.contract.command_errors import usage_error

_PANEL = "Request"


def _option(kind: Any, *names: str, help: str) -> Any:
    # Ranges stay out of this table: the contract checks them, and reports every fault at once.
    # Defaults stand in brackets, which rich would read as markup.
    help = help.replace("[", r"\[")
    return Annotated[kind, typer.Option(*names, help=help, rich_help_panel=_PANEL)]


# Field of GenerationRequest -> option. Absent options are left out of the request.
_REQUEST_OPTIONS: dict[str, Any] = {
    "max_tokens": _option(int | None, "--max-tokens", help="Tokens to generate [256]."),
    "min_tokens": _option(int | None, "--min-tokens", help="Tokens before it may stop [0]."),
    "temperature": _option(
        float | None, "--temperature", "-t", help="0 is greedy, at most 2 [1.0]."
    ),
    "top_p": _option(float | None, "--top-p", help="Nucleus, in (0, 1] [1.0]."),
    "top_k": _option(int | None, "--top-k", help="Most likely tokens kept; 0 is all [0]."),
    "min_p": _option(float | None, "--min-p", help="Least share of the likeliest [0]."),
    "presence_penalty": _option(float | None, "--presence-penalty", help="In [-2, 2] [0]."),
    "frequency_penalty": _option(float | None, "--frequency-penalty", help="In [-2, 2] [0]."),
    "repetition_penalty": _option(float | None, "--repetition-penalty", help="Above 0 [1.0]."),
    "seed": _option(int | None, "--seed", help="Same seed, same tokens [drawn]."),
    "stop": _option(list[str] | None, "--stop", help="Stop before this text; repeatable."),
    "n": _option(int | None, "-n", "--choices", help="How many texts, 1 to 16 [1]."),
    "ignore_eos": _option(bool, "--ignore-eos", help="Go on after the end token."),
    "logprobs": _option(int | None, "--logprobs", help="Alternatives a token, 0 to 20."),
    "deadline_s": _option(float | None, "--deadline-s", help="Seconds the job may take."),
    "chat": _option(bool, "--chat", help="The prompt is a user's turn of a chat."),
    "system": _option(str | None, "--system", help="System message; implies --chat."),
}


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` the options above; it receives them as the dict ``fields``."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "fields"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if name in ("ignore_eos", "chat") else None,
            annotation=annotation,
        )
        for name, annotation in _REQUEST_OPTIONS.items()
    ]

    @functools.wraps(command)
    def with_fields(**values: Any) -> Any:
        fields = {name: values.pop(name) for name in _REQUEST_OPTIONS}
        # `is`, because 0 equals False and is a value.
        given = {k: v for k, v in fields.items() if v is not None and v is not False and v != []}
        return command(**values, fields=given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    with_fields.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_fields.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_fields


def request_fields(prompt: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    """``prompt`` (``-`` reads stdin) and options as the keyword arguments of a request."""
    fields = dict(fields)
    chat, system = fields.pop("chat", False), fields.pop("system", None)
    if prompt == "-":
        prompt = _read("-")
    if prompt is None:
        return fields
    if not (chat or system):
        return {"prompt": prompt, **fields}
    messages = [{"role": "system", "content": system}] if system else []
    return {"messages": [*messages, {"role": "user", "content": prompt}], **fields}


def read_requests(path: str, defaults: dict[str, Any]) -> list[GenerationRequest]:
    """The requests of a JSON-lines file (``-`` is stdin), each line over ``defaults``.

    Raises:
        CommandError: naming the line and every fault of the first lines that are wrong, or that
            it is no UTF-8; nothing has been enqueued then.
    """
    if not defaults.keys().isdisjoint(("chat", "system")):
        raise usage_error("--chat and --system shape one prompt; in a file, give messages")
    requests, faults = [], []
    # Not splitlines: U+2028 and the like may stand in a JSON string as they are.
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            requests.append(_request_of_line(line, defaults))
        except InvalidRequest as error:
            faults.append(f"line {number}: {error.message}")
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise usage_error(f"{path}: {'; '.join(faults[:3])}{more}; nothing was enqueued")
    if not requests:
        raise usage_error(f"{path} holds no jobs: give one JSON object a line")
    return requests


def _read(path: str) -> str:
    """What the file ``path`` (``-`` is stdin) holds."""
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        where = "stdin" if path == "-" else path
        raise usage_error(
            f"{where} is no UTF-8 text (byte {error.start + 1}): convert it, with iconv say"
        ) from None


def _request_of_line(line: str, defaults: dict[str, Any]) -> GenerationRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        fault = Fault(field="line", rule=f"must be JSON ({error})", got=describe(line))
        raise InvalidRequest.from_faults([fault]) from None
    if not isinstance(fields, dict):
        fault = Fault(field="line", rule="must be one JSON object", got=describe(fields))
        raise InvalidRequest.from_faults([fault])
    return GenerationRequest(**{**defaults, **{str(k): v for k, v in fields.items()}})
