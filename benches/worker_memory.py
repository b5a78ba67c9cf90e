"""The resident memory of a worker on the CPU, and what of it is not the model file.

    python -m benches.worker_memory FILE... [--jobs 16] [--prompt 40] [--tokens 8]

Each file is served by ``llorch worker`` in bfloat16, with room for 16 sequences of 2,048 tokens.
Linux only. "shared" are pages of files, libraries above all: workers on one machine share them, and
the kernel drops them when memory is short. The rows:

- ready: the worker takes jobs. No block of its KV cache has been used but the warm-up's.
- after the jobs: all have ended. Steps have freed their tensors, and glibc keeps the memory.
- idle: the engine has returned it.
- import torch: a process that did only that, for comparison.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benches.arguments import existing_path, known_errors
from llorch_worker.client import Client
from llorch_worker.engine.thread import TIDY_AFTER_S
from llorch_worker.settings import default_model_name
from tests.services import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    environment,
    own_redis,
    start_python,
    wait_until,
)

SIZES = {"device": "cpu", "dtype": "bfloat16", "max_sequences": 16, "max_context": 2048}
MIB = 2**20
RESULT_S = 600
IMPORT = "import torch; print(open('/proc/self/status').read())"


@dataclass(frozen=True)
class Resident:
    """Bytes of one process."""

    all: int
    shared: int

    @classmethod
    def of(cls, status: str) -> Resident:
        """From the content of ``/proc/PID/status``."""
        figures = dict(line.split(":", 1) for line in status.strip().splitlines())
        kib = {name: int(figures[name].split()[0]) for name in ("VmRSS", "RssFile")}
        return cls(kib["VmRSS"] * 1024, kib["RssFile"] * 1024)


def measure(file: Path, jobs: int, prompt: int, tokens: int) -> dict[str, Resident]:
    """A worker's memory in each state."""
    with tempfile.TemporaryDirectory() as folder, own_redis() as server:
        variables = environment(server.url, model=file, **SIZES)
        del variables["OMP_NUM_THREADS"]  # as users start it
        said, log = Path(folder, "said"), Path(folder, "log")
        worker = start_python(
            "llorch_worker.cli", "worker", "--json",
            variables=variables, log=log, out=said, fresh=True,
        )  # fmt: skip

        def ready() -> bool:
            if worker.poll() is not None:
                raise SystemExit(log.read_text(errors="replace"))
            return said.exists() and said.read_text().rstrip().endswith("}")

        def resident() -> Resident:
            return Resident.of(Path(f"/proc/{worker.pid}/status").read_text(encoding="ascii"))

        try:
            wait_until(ready, timeout_s=START_TIMEOUT_S, what="the worker to be ready")
            found = {"ready": resident()}
            chance = random.Random(0)
            with Client(server.url) as client:
                sent = [
                    client.submit(
                        model=default_model_name(file),
                        prompt_token_ids=[chance.randrange(3, 256) for _ in range(prompt)],
                        max_tokens=tokens,
                        ignore_eos=True,
                    )
                    for _ in range(jobs)
                ]
                for job in sent:
                    job.result(RESULT_S)
            found["after the jobs"] = resident()
            time.sleep(TIDY_AFTER_S + 1)
            found["idle"] = resident()
        finally:
            worker.terminate()
            worker.wait(STOP_TIMEOUT_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=existing_path, nargs="+", metavar="FILE")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=40, help="tokens")
    parser.add_argument("--tokens", type=int, default=8)
    options = parser.parse_args()
    imported = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    print(f"{'MiB':<24}{'':<16}{'resident':>10}{'shared':>8}{'beyond file':>13}")
    torch_alone = Resident.of(imported.stdout)
    print(f"{'import torch':<40}{torch_alone.all / MIB:>10,.0f}{torch_alone.shared / MIB:>8,.0f}")
    for file in options.files:
        for state, found in measure(file, options.jobs, options.prompt, options.tokens).items():
            beyond = (found.all - file.stat().st_size) / MIB
            print(
                f"{file.name:<24}{state:<16}{found.all / MIB:>10,.0f}{found.shared / MIB:>8,.0f}"
                f"{beyond:>13,.0f}"
            )


if __name__ == "__main__":
    with known_errors():
        main()
