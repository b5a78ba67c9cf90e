"""The model families, one file each: what their files and their graphs have beyond Llama's.

A new family is a file like one of these and a name in ``FAMILIES``; docs/FAMILIES.md walks through
adding one.
"""

from llorch_worker.model.families.family import Family
from llorch_worker.model.families.gemma import GEMMA2, GEMMA3
from llorch_worker.model.families.granite import GRANITE
from llorch_worker.model.families.llama import LLAMA
from llorch_worker.model.families.ministral import MINISTRAL
from llorch_worker.model.families.olmo import OLMO2, OLMO3
from llorch_worker.model.families.phi3 import PHI3
from llorch_worker.model.families.qwen import QWEN2, QWEN3
from llorch_worker.model.families.smollm3 import SMOLLM3

FAMILIES = (
    *(LLAMA, QWEN2, QWEN3, PHI3, GRANITE, SMOLLM3, MINISTRAL),
    *(GEMMA2, GEMMA3, OLMO3, OLMO2),
)
BY_NAME = {family.name: family for family in FAMILIES}
BY_GGUF = {family.gguf: family for family in FAMILIES}
BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}

__all__ = ["BY_GGUF", "BY_MODEL_TYPE", "BY_NAME", "FAMILIES", "Family"]
