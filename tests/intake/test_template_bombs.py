"""A template that computes ends in time, whatever it computes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.intake.bombs import broken, computing
from tests.sizes import sized

MEMORY_MIB = 64
RENDER = f"""
import json, logging, resource, sys
from llorch_worker.intake import desk
from llorch_worker.intake.asking import Bounds, header_of
from llorch_worker.text.chat_templates import ChatTemplates
import transformers.utils.chat_template_utils

heard = []
log = desk.Forwarding(lambda frame: heard.append(header_of(frame)["log"][2]))
logging.getLogger("llorch_worker").addHandler(log)
logging.getLogger("llorch_worker").propagate = False
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
bounds = Bounds(cpu_s=float(sys.argv[1]), memory_bytes={MEMORY_MIB} * 2**20)
for template in json.load(sys.stdin):
    desk.found_in_a_fork(ChatTemplates({{"default": template}}, {{}}), bounds, log)
    print(heard.pop().partition("the model's chat template ")[2] if heard else "nothing")
most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print((most - before) / 1024)
"""


def rendered(templates: list[str], cpu_s: float) -> tuple[list[str], float]:
    """What is said of a small chat in each, and the MiB that the largest took."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RENDER, str(cpu_s)],
        input=json.dumps(templates),
        capture_output=True,
        text=True,
        check=True,
    )
    *said, took_mib = run.stdout.splitlines()
    return said, float(took_mib)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_each_template_that_computes_ends_for_its_time_or_its_memory() -> None:
    templates = [*computing()]
    said, took_mib = rendered(templates, 0.03)
    assert len(said) == len(templates) >= sized(usual=110, full=290)
    kinds = Counter(said)
    memory = kinds["takes more memory than there is for it"]
    time = kinds["takes more than 0.03 s of processor time"]
    # Which of both comes first is a matter of the machine's speed.
    assert memory + time > sized(usual=85, full=190)
    assert min(memory, time) > 0
    assert [line for line in kinds if "crashes" in line] == []
    assert took_mib < 2 * MEMORY_MIB


def test_each_template_that_cannot_compile_is_refused_with_a_sentence() -> None:
    said, _ = rendered([*broken()], 5)
    kinds = Counter(said)
    assert kinds.pop("refuses them: it failed with RecursionError") > 5
    assert kinds == dict.fromkeys(
        (
            "is broken: 'break' outside loop",
            "is broken: 'continue' not properly in loop",
            "is broken: too many levels of indentation",
            "is broken in line 1",
        ),
        1,
    )
