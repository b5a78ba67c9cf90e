"""Sends random histories to a gateway, as clients and frameworks themselves write them.

    python -m benches.histories http://localhost:8080/v1 --model demo

Each history is sent in every way of a client, and then again with its answer and one more
question. It fails if any is refused. The environments are those of ``benches/clients.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from benches.clients import installed
from benches.histories.turns import history
from benches.recording import recorded

HERE = Path(__file__).parent
PROGRAMS = {
    "openai": "openai_python",
    "langchain-openai": "langchain",
    "litellm": "litellm_",
    "pydantic-ai": "pydantic_ai_",
    "openai-agents": "openai_agents",
    "autogen": "autogen",
    "haystack": "haystack_",
    "llama-index": "llama_index_",
    "anthropic": "anthropic_",
    "ai-sdk": "ai_sdk.mjs",
}
MOST_TO_A_CLIENT_S = 3600


def command_of(name: str, folder: Path) -> list[str]:
    """Installs a client; what sends the histories of its standard input."""
    home, program = installed(name, folder)
    code = PROGRAMS[name]
    if program != "node":
        return [program, "-m", "benches.histories.sending", code]
    # A module of JavaScript finds packages beside itself.
    return [program, str(shutil.copy(HERE / "clients" / code, home / code))]


def reports(name: str, histories: str, folder: Path, variables: dict[str, str]) -> list[str]:
    """Runs a client; what it says of each request, a line of JSON."""
    root = HERE.parent.parent
    ran = subprocess.run(
        command_of(name, folder),
        input=histories,
        env=variables | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=MOST_TO_A_CLIENT_S,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"way"')]
    if ran.returncode:
        report = {"way": "program", "seed": None, "error": f"ended early: {ran.stderr[-2000:]}"}
        lines.append(json.dumps(report))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="of the gateway's API, with /v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--count", type=int, default=1000, help="of histories for all clients")
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--at-once", type=int, default=2, help="clients that run at a time")
    parser.add_argument("--folder", type=Path, default=Path("clients"), help="for environments")
    parser.add_argument("--record", type=Path, help="a folder for what each client sends")
    given = parser.parse_args()
    variables = os.environ | {"OPENAI_API_KEY": "none", "MODEL": given.model}
    share = -(-given.count // len(given.only))
    failed = False

    def run(place: int) -> tuple[str, list[str], float]:
        seeds = range(given.seed + place * share, given.seed + (place + 1) * share)
        lines = "".join(json.dumps(history(seed)) + "\n" for seed in seeds)
        name, began_s = given.only[place], time.monotonic()
        to = None if given.record is None else given.record / f"{name}.jsonl"
        with nullcontext(given.url) if to is None else recorded(given.url, to) as url:
            own = variables | {"OPENAI_BASE_URL": url}
            said = reports(name, lines, given.folder.absolute(), own)
        return name, said, time.monotonic() - began_s

    with ThreadPoolExecutor(given.at_once) as pool:
        for name, lines, took_s in pool.map(run, range(len(given.only))):
            said = [json.loads(line) for line in lines]
            ways = len({report["way"] for report in said})
            faults = [report for report in said if report["error"] is not None]
            print(
                f"{name:18}{share:5} histories, {ways} ways: {len(faults)} failed, {took_s:.0f} s"
            )
            kinds = Counter((report["way"], report["error"][:300]) for report in faults)
            seeds = {(report["way"], report["error"][:300]): report["seed"] for report in faults}
            for (way, error), times in kinds.most_common():
                print(f"    {times} x {way}, first seed {seeds[way, error]}: {error}")
            failed |= bool(faults) or not said
            sys.stdout.flush()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
