"""On a CPU the KV cache takes memory as its blocks are used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 2**20
MEASURE = """
import gc, json, sys
import psutil
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine

def resident():
    gc.collect()
    return psutil.Process().memory_info().rss

before = resident()
options = {"max_sequences": 1024, "kv_dtype": sys.argv[2]}
with Engine.load(sys.argv[1], device="cpu", dtype="float32", **options) as engine:
    engine.warm_up()
    found = [resident() - before]
    prompts = [[3 + (number + at) % 500 for at in range(500)] for number in range(8)]
    jobs = [
        engine.submit(GenerationRequest(prompt_token_ids=prompt, max_tokens=1, temperature=0))
        for prompt in prompts
    ]
    for job in jobs:
        job.result(120)
    found.append(resident() - before)
    stats = engine.stats()
    planned = stats.planned_bytes
    kv = planned["kv"] + planned.get("kv_scales", 0)
    print(json.dumps([*found, stats.bytes["weights"], kv, kv // stats.kv_blocks_total]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems fill pages otherwise")
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_worker_is_as_large_as_the_blocks_that_it_has_used(
    demo_model: Path, kv_dtype: str
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, demo_model, kv_dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    idle, used, weights, kv, block = json.loads(run.stdout)
    assert kv > 350 * MIB, "the plan has all 1,024 contexts"
    assert idle < weights + 100 * MIB, "modules, a step, and one huge page for each layer"
    # 8 prompts of 500 tokens fill 31 blocks each and begin one.
    assert used < weights + 100 * MIB + 2 * 8 * 32 * block
