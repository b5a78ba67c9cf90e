"""Records what coding agents send: ``python -m benches.histories.agents NAME COMMAND``.

The agent talks to a gateway before the stub of :mod:`llorch_worker.testing`, whose scripted answers
call two tools and then say a word. What the agent sent goes to tests/gateway/recorded/, with its
texts cut and without whose and where they are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benches.recording import recorded
from llorch_worker.testing import Stub
from llorch_worker.testing.http import serving

RECORDED = Path(__file__).parents[2] / "tests" / "gateway" / "recorded"
MOST_CHARACTERS = 40


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


def called(step: tuple[str, Mapping[str, str]]) -> str:
    """A call as the stub reads it."""
    name, arguments = step
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def run(name: str, command: str, folder: Path) -> list[Any]:
    """The requests of an agent that runs in ``folder``."""
    agent, lines = AGENTS[name], folder / "sent.jsonl"
    home, project = folder / "home", folder / "project"
    for each in (home, project):
        each.mkdir()
    (project / "hello.py").write_text("print('hello')\n")
    with Stub("stories") as stub, serving(stub.url, folder) as gateway:
        stub.answer(*map(called, agent.steps), "Done.")
        with recorded(gateway, lines) as url:
            (home / "config.toml").write_text(CONFIG.format(url=url))
            own = {k: v.format(url=url, home=home) for k, v in agent.environment.items()}
            subprocess.run(
                [os.path.abspath(command), *agent.arguments],
                cwd=project,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                check=True,
                timeout=300,
            )
    sent = map(json.loads, lines.read_text(encoding="utf-8").splitlines())
    chats = [request for request in sent if request["path"].partition("?")[0] == agent.path]
    return [cleaned(chat, {str(project): "/project", str(home): "/home"}) for chat in chats]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("name", choices=AGENTS)
    options.add_argument("command", help="the agent's program")
    arguments = options.parse_args()
    name, command = arguments.name, arguments.command
    with tempfile.TemporaryDirectory() as folder:
        requests = run(name, command, Path(folder))
    for request in requests[1:]:
        if request["body"]["tools"] == requests[0]["body"]["tools"]:
            # Tests put them back.
            del request["body"]["tools"]
    file = RECORDED / f"{name}.jsonl"
    lines = [json.dumps(request, ensure_ascii=False) + "\n" for request in requests]
    file.write_text("".join(lines), encoding="utf-8")
    print(f"{len(requests)} requests of {len(AGENTS[name].steps) + 1} in {file}")


if __name__ == "__main__":
    main()
