"""A server with OpenAI's API and no model, in the ways of each that a worker knows; it misbehaves
where a prompt asks it to.

Token ``i`` of an answer has the text ``w<i> `` and the id ``1000 + i``. A prompt's tokens are its
words. Prompts that do something else:

- ``cut <n>``: the connection ends after n tokens; ``end <n>``: the answer does, without its end.
- ``endless``: tokens without end; ``silent``: none at all after the first.
- ``torn``: the connection ends after the reason why the answer has.
- ``huge``: an event of 100 MB; ``heap``: a hundred of 1 MB.
- ``noise``: events that are no JSON; ``odd``: one of a byte that is none.
- ``page``: a web page in place of events.
- ``call``: a thought and calls without ids of their tokens, as :data:`CALL` has them.
- ``mute``: tokens without a text; ``filter``: an answer that a filter ends.
- ``status <n>``: an error with this status, whose message quotes the prompt.
- ``error``: an error amid the answer.
- ``die``: the process ends; ``die at <n>``: after n tokens.
- ``slow <ms>``: so long for each token.
- ``hold``: nothing until the request is closed; ``late``: nothing for a second.

``python -m tests.servers.stand_in PORT KIND`` runs it as a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tests.services import LOCALHOST, free_port

MODEL = "toy"
CONTEXT = 4096
FIRST_ID = 1000
CALL = (
    {"reasoning_content": "I look "},
    {"reasoning_content": "it up."},
    {"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"where": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"sea"}'}}]},
    {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "look", "arguments": "{"}}]},
    {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "look", "arguments": "}"}}]},
)
"""The first call has no id; the second is told its own again."""
OWNERS = {"vLLM": "vllm", "SGLang": "sglang", "llama-server": "llamacpp"}


class StandIn:
    def __init__(self, kind: str, *, key: str | None = None, counts: bool = True) -> None:
        """``counts``: whether it tells what it counted."""
        self.kind = kind
        self.key = key
        self.counts = counts
        self.well = True
        self.health = ""
        """What it says of its health."""
        self.looks: list[str] = []
        """The pages by which it was asked whether it lives."""
        self.port = free_port()
        self.busy = 0
        """How many more requests it refuses as it is busy."""
        self.room: int | None = None
        """How many answers it gives at once; None for any number."""
        self.unreached = 0
        """How many more requests a proxy before it answers itself, but those for its health."""
        self.busy_models = 0
        """How often it refuses to list its models."""
        self.said_between = b""
        """What it sends before each token."""
        self.detokenizes = asyncio.Event()
        """Unset: no question for a text is answered."""
        self.detokenizes.set()
        self.questions = 0
        """For a text."""
        self.card: dict[str, Any] = {}
        """What it says of the model beside the usual."""
        self.others: list[dict[str, Any]] = []
        """What it says of other models."""
        self.counted: dict[str, Any] = {}
        """What it has counted otherwise."""
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.callers: list[Any] = []
        """The address of each who sent something."""
        self.open = self.most_open = 0
        self.stop: Callable[[], None]
        """Ends it as a signal would that asks it to: it gives up its answers. Once it runs."""
        self._stops = False
        self._step_s = float(os.environ.get("STAND_IN_STEP_MS", "0")) / 1e3

    @property
    def url(self) -> str:
        return f"http://{LOCALHOST}:{self.port}/v1"

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._admit], client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/props", self._props)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/apply-template", self._render)
        for path in ("/v1/completions", "/v1/chat/completions", "/completion"):
            app.router.add_post(path, self._answer)
        return app

    @web.middleware
    async def _admit(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if self.unreached and request.path != "/health":
            self.unreached -= 1
            return web.Response(status=502, text="<html>", content_type="text/html")
        if request.method == "POST":
            self.callers.append(request.transport.get_extra_info("peername"))
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        self.looks.append(request.path)
        if self.busy_models:
            self.busy_models -= 1
            return web.json_response({"error": {"message": "busy"}}, status=429)
        card = {"id": MODEL, "owned_by": OWNERS.get(self.kind, "somebody")}
        if self.kind in ("vLLM", "SGLang"):
            card["max_model_len"] = CONTEXT
        return web.json_response({"object": "list", "data": [*self.others, card | self.card]})

    async def _health(self, request: web.Request) -> web.Response:
        self.looks.append(request.path)
        return web.Response(status=200 if self.well else 503, text=self.health)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "1.2"})

    async def _props(self, _: web.Request) -> web.Response:
        settings = {"default_generation_settings": {"n_ctx": CONTEXT}, "total_slots": 3}
        return web.json_response(
            {**settings, "build_info": "b1", "chat_template": "{{ messages }}"}
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = body.get("content") or body.get("prompt") or _chat(body)
        return web.json_response({"tokens": list(range(1, 1 + len(text.split())))})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["tokens"]
        self.questions += 1
        await self.detokenizes.wait()
        text = "".join(_word(each - FIRST_ID) for each in tokens)
        name = {"llama-server": "content", "vLLM": "prompt"}.get(self.kind, "text")
        return web.json_response({name: text})

    async def _render(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": _chat(await request.json())})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append((request.path, body))
        if self.busy or self.open == self.room:
            self.busy = max(0, self.busy - 1)
            return web.json_response({"error": {"message": "busy"}}, status=503)
        prompt = body.get("prompt", "")
        begun = 0
        if isinstance(prompt, list):
            begun = sum(1 for each in prompt if each >= FIRST_ID)
            text = ""
        else:
            text = prompt or _chat(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._stream(request, body, text, begun)
        finally:
            self.open -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], text: str, begun: int
    ) -> web.StreamResponse:
        words = text.split() or [""]
        number = next((int(word) for word in words if word.isdigit()), 0)
        if words[0] == "die" and words[1:2] != ["at"]:
            os._exit(9)
        if words[0] == "status":
            error = {"message": f"no: {text}", "type": "some_error"}
            return web.json_response({"error": error}, status=number)
        if words[0] == "page":
            return web.Response(text="<html>", content_type="text/html")
        # As servers do: a text without a number gets 16, one with null as many as fit.
        size = len(body["prompt"]) if isinstance(body.get("prompt"), list) else len(words)
        room = CONTEXT - size
        most = body.get("n_predict", body.get("max_tokens", 16)) or room
        if self.kind == "llama-server" or (self.kind == "vLLM" and most <= CONTEXT):
            # They end the answer there, and say nothing.
            most = min(most, room)
        if most > room:
            error = {"message": f"maximum context length is {CONTEXT}", "type": "some_error"}
            return web.json_response({"error": error}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if words[0] in ("hold", "late"):
            await asyncio.sleep(300 if words[0] == "hold" else 1)
        if words[0] == "call":
            most = min(most, len(CALL))
        step_s = number / 1e3 if words[0] == "slow" else self._step_s
        for at in range(begun, 10**9 if words[0] == "endless" else begun + most):
            made = at - begun
            if self._stops and made:
                for event in self._last(request.path, made, size, "abort"):
                    await _send(response, event)
                return response
            match words:
                case ["cut", _] if made == number:
                    request.transport.abort()
                    return response
                case ["end", _] if made == number:
                    return response
                case ["die", "at", _] if made == number:
                    os._exit(9)
                case ["silent"] if made:
                    await asyncio.sleep(300)
                case ["error"] if made:
                    await _send(response, {"error": {"message": f"no: {text}", "code": 500}})
                    return response
                case ["noise"]:
                    await response.write(b"data: {no JSON\n\n")
                case ["odd"]:
                    odd = {"id": 1, "token": "a", "logprob": 0, "bytes": [300]}
                    await _send(response, {"content": "a", "completion_probabilities": [odd]})
                case ["huge"]:
                    await response.write(b"data: " + b"x" * 100_000_000)
                case ["heap"]:
                    await _send(response, self._event(request.path, at, "x" * 900_000))
            await response.write(self.said_between)
            said = "" if words[0] == "mute" else _word(at)
            event = self._event(request.path, at, said)
            if words[0] == "call":
                event = {"choices": [{"index": 0, "delta": CALL[at]}]}
            await _send(response, event)
            await asyncio.sleep(step_s)
        reason = {"filter": "content_filter", "call": "tool_calls"}.get(words[0], "length")
        for event in self._last(request.path, most, size, reason):
            await _send(response, event)
            if words[0] == "torn":
                request.transport.abort()
                return response
        if request.path != "/completion":
            await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, path: str, at: int, text: str) -> dict[str, Any]:
        if path == "/completion":
            return {"content": text, "tokens": [FIRST_ID + at], "stop": False}
        said = {"text": text} if path == "/v1/completions" else {"delta": {"content": text}}
        if self.kind == "vLLM" or (self.kind == "SGLang" and path == "/v1/completions"):
            said["token_ids"] = [FIRST_ID + at]
        return {"choices": [{"index": 0, **said}]}

    def _last(self, path: str, made: int, prompt: int, reason: str) -> Iterator[dict[str, Any]]:
        if path == "/completion":
            counts = {"tokens_predicted": made, "tokens_evaluated": prompt}
            yield {"content": "", "stop": True, "stop_type": "limit", **counts}
            return
        yield {"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": reason}]}
        if self.counts:
            usage = {"prompt_tokens": prompt, "completion_tokens": made} | self.counted
            yield {"choices": [], "usage": usage}

    @contextmanager
    def running(self) -> Iterator[StandIn]:
        """Runs it on a thread of this process."""
        loop = asyncio.new_event_loop()
        runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.1)

        async def start() -> web.TCPSite:
            await runner.setup()
            site = web.TCPSite(runner, LOCALHOST, self.port)
            await site.start()
            return site

        async def stop() -> None:
            await site.stop()
            self._stops = True

        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            site = asyncio.run_coroutine_threadsafe(start(), loop).result()
            self.stop = lambda: asyncio.run_coroutine_threadsafe(stop(), loop).result()
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def _word(at: int) -> str:
    return f"w{at} "


def _chat(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def main(port: str, kind: str) -> None:
    stand_in = StandIn(kind, counts=True)
    web.run_app(stand_in.app(), host=LOCALHOST, port=int(port), print=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
