"""Records what coding agents send: ``python -m benches.histories.agents NAME COMMAND``.

The agent talks to a script here, which lets it call two tools and then says a word. The script
speaks by the gateway's own code, so an agent that ends well has understood that. What the agent
sent goes to tests/gateway/recorded/, with its texts cut and without whose and where they are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benches.recording import kept_headers
from llorch_worker.anthropic_api.messages import MessagesRequest
from llorch_worker.contract import (
    Choice,
    Finished,
    FunctionCall,
    GenerationResult,
    Started,
    Timings,
    Tokens,
    ToolCall,
    Usage,
)
from llorch_worker.contract.tools import CallPart
from llorch_worker.openai_api.responses import new_record
from llorch_worker.openai_api.responses_events import ResponseEvents
from llorch_worker.openai_api.responses_items import ItemReference
from llorch_worker.openai_api.responses_request import ResponseRequest

RECORDED = Path(__file__).parents[2] / "tests" / "gateway" / "recorded"
MOST_CHARACTERS = 40
TIMINGS = Timings(queue_ms=0, prefill_ms=0, first_token_ms=0, decode_ms=0)
USAGE = Usage(prompt=9, completion=9)


class Agent(NamedTuple):
    """``steps``: the calls it is to make, each a tool's name and arguments."""

    path: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    steps: Sequence[tuple[str, Mapping[str, str]]]


CONFIG = """
model = "stories"
model_provider = "llorch"
[model_providers.llorch]
name = "llorch"
base_url = "{url}/v1"
wire_api = "responses"
"""
AGENTS = {
    "codex": Agent(
        "/v1/responses",
        ("exec", "--skip-git-repo-check", "--sandbox", "read-only", "Look around."),
        {"CODEX_HOME": "{home}"},
        (("exec_command", {"cmd": "ls"}), ("exec_command", {"cmd": "cat hello.py"})),
    ),
    "claude": Agent(
        "/v1/messages",
        ("-p", "Look around.", "--allowedTools", "Bash"),
        {
            "HOME": "{home}",
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "stories",
            "ANTHROPIC_SMALL_FAST_MODEL": "stories",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        (
            ("Bash", {"command": "ls", "description": "Look"}),
            ("Bash", {"command": "cat hello.py", "description": "Read"}),
        ),
    ),
}


def result(agent: Agent, turn: int) -> GenerationResult:
    call = None
    if turn < len(agent.steps):
        name, arguments = agent.steps[turn]
        function = FunctionCall(name=name, arguments=json.dumps(arguments))
        call = ToolCall(id=f"call_{turn}", function=function)
    choice = Choice(
        index=0,
        text="" if call else "Done.",
        token_ids=(1,),
        finish_reason="tool_calls" if call else "stop",
        tool_calls=(call,) if call else None,
    )
    return GenerationResult(
        id=f"job-{turn}",
        model="stories",
        choices=(choice,),
        usage=USAGE,
        seed=1,
        timings=TIMINGS,
        worker="w",
    )


def tokens(end: GenerationResult) -> Tokens:
    (choice,) = end.choices
    parts = [
        CallPart(index=0, id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in choice.tool_calls or ()
    ]
    return Tokens(index=0, ids=(1,), text=choice.text, tool_calls=tuple(parts) or None)


def events(path: str, body: dict[str, Any], end: GenerationResult) -> Iterator[Mapping[str, Any]]:
    if path == "/v1/responses":
        request = ResponseRequest.model_validate(body)
        items = [item for item in request.input if not isinstance(item, ItemReference)]
        generation = request.to_generation(items)
        made = ResponseEvents(new_record(request, items, generation, job_id=end.id, created_at=0))
        yield from (*made.begin(), *made.tokens(tokens(end)), *made.end(end))
        return
    message = MessagesRequest.model_validate(body)
    chunks = message.chunks(message.to_requests(), end.id, 0)
    chunks.started(0, Started(worker="w", model="stories", prompt_tokens=9, queue_ms=0))
    yield from chunks.tokens(0, tokens(end))
    reason = end.choices[0].finish_reason
    finished = Finished(finish_reason=reason, usage=USAGE, timings=TIMINGS)
    yield from chunks.finished(0, finished, end)
    yield from chunks.end()


class Script(BaseHTTPRequestHandler):
    agent: ClassVar[Agent]
    sent: ClassVar[list[dict[str, Any]]] = []

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.partition("?")[0]
        if path != self.agent.path:
            return self.send_error(404)
        headers = kept_headers(self.headers.items())
        self.sent.append({"path": self.path, "headers": headers, "body": body})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in events(path, body, result(self.agent, len(self.sent) - 1)):
            line = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
            self.wfile.write(line.encode())
        return None

    def log_message(self, *_: object) -> None:
        pass


def cleaned(value: Any, secrets: Mapping[str, str]) -> Any:
    """With short texts, and placeholders for ``secrets`` and for ids of the machine."""
    match value:
        case dict():
            return {name: cleaned(each, secrets) for name, each in value.items()}
        case list():
            return [cleaned(each, secrets) for each in value]
        case str():
            for secret, name in secrets.items():
                value = value.replace(secret, name)
            value = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32,}", "0", value)
            return value[:MOST_CHARACTERS]
    return value


def main(name: str, command: str) -> None:
    agent = Script.agent = AGENTS[name]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as project:
        Path(home, "config.toml").write_text(CONFIG.format(url=url))
        Path(project, "hello.py").write_text("print('hello')\n")
        own = {k: v.format(url=url, home=home) for k, v in agent.environment.items()}
        subprocess.run(
            [os.path.abspath(command), *agent.arguments],
            cwd=project,
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            check=True,
            timeout=300,
        )
        secrets = {project: "/project", home: "/home"}
        recorded = cleaned(Script.sent, secrets)
    for request in recorded[1:]:
        if request["body"]["tools"] == recorded[0]["body"]["tools"]:
            # Tests put them back.
            del request["body"]["tools"]
    RECORDED.mkdir(exist_ok=True)
    file = RECORDED / f"{name}.jsonl"
    lines = [json.dumps(request, ensure_ascii=False) + "\n" for request in recorded]
    file.write_text("".join(lines), encoding="utf-8")
    print(f"{len(recorded)} requests of {len(agent.steps) + 1} in {file}")


if __name__ == "__main__":
    main(*sys.argv[1:])
