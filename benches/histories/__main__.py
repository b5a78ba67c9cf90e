"""Sends random histories to a gateway, as clients and frameworks themselves write them.

    python -m benches.histories http://localhost:8080/v1 --model demo

Each history is sent in every way of a client, and then again with its answer and one more
question. It fails if any is refused. The environments are those of ``benches/clients.py``.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benches.clients import installed, options, ran
from benches.histories.turns import history

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


def command_of(name: str, folder: Path) -> list[str]:
    """Installs a client; what sends the histories of its standard input."""
    home, program = installed(name, folder)
    code = PROGRAMS[name]
    if program != "node":
        return [program, "-m", "benches.histories.sending", code]
    # A module of JavaScript finds packages beside itself.
    return [program, str(shutil.copy(HERE / "clients" / code, home / code))]


def main() -> None:
    parser = options(str(__doc__).partition("\n")[0], PROGRAMS)
    parser.add_argument("--count", type=int, default=1000, help="of histories for all clients")
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--at-once", type=int, default=2, help="clients that run at a time")
    given = parser.parse_args()
    share = -(-given.count // len(given.only))
    failed = False

    def run(place: int) -> tuple[str, list[str], float]:
        seeds = range(given.seed + place * share, given.seed + (place + 1) * share)
        lines = "".join(json.dumps(history(seed)) + "\n" for seed in seeds)
        name = given.only[place]
        done, took_s = ran(name, command_of(name, given.folder.absolute()), given, input=lines)
        said = [line for line in done.stdout.splitlines() if line.startswith('{"way"')]
        if done.returncode:
            error = f"ended early: {done.stderr[-2000:]}"
            said.append(json.dumps({"way": "program", "seed": None, "error": error}))
        return name, said, took_s

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
