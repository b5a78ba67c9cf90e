"""What others use of an engine is written down once, where no torch is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from llorch_worker.engine import Engine
from llorch_worker.engine.interface import EngineInterface, ModelFacts
from llorch_worker.weights import fingerprint, open_checkpoint

HEAVY = ("torch", "transformers", "tokenizers", "llguidance", "numpy")


def test_the_interface_imports_nothing_heavy() -> None:
    code = f"import llorch_worker.engine.interface, sys; print({HEAVY} & sys.modules.keys())"
    code = code.replace(str(HEAVY), str(set(HEAVY)))
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "set()\n", printed.stderr


def test_an_engine_tells_what_is_fixed_from_its_load_on(trained_model: Path) -> None:
    file = trained_model / "f32.gguf"
    with Engine.load(file, device="cpu", max_sequences=3, kernels="torch") as loaded:
        engine: EngineInterface = loaded
        stats = engine.stats()
        assert engine.facts == ModelFacts(
            model_name=stats.model,
            fingerprint=fingerprint(open_checkpoint(file)),
            arithmetic="cpu, float32, KV float32, torch and torch kernels",
            max_context=stats.max_context,
            max_sequences=3,
            vocab_size=loaded.config.vocab_size,
            pool_tokens=stats.kv_blocks_total * loaded.cache.block_size,
            drafts=True,
            drafter="suffix",
            device=stats.device,
        )
