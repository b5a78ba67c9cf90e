"""Runs the conversions, each in the interpreter that has its packages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benches.peers.contestants.contestant import (
    CTRANSLATE2,
    ONNXRUNTIME,
    OPENVINO,
    VLLM,
    CannotRun,
)
from benches.peers.contestants.process import Interpreter, last_line
from llorch_worker.weights.checkpoint import Checkpoint
from llorch_worker.weights.contents import stored_numbers, tensor_types

SOURCE: Final = "SOURCE"
TARGET: Final = "TARGET"
_CTRANSLATE2: Final = (
    *("-m", "ctranslate2.converters.transformers"),
    *("--model", SOURCE, "--output_dir", TARGET, "--low_cpu_mem_usage"),
)
_ONNXRUNTIME: Final = (
    *("-m", "onnxruntime_genai.models.builder"),
    *("-m", SOURCE, "-o", TARGET, "-e", "cpu"),
)
_OPENVINO: Final = (
    *("-m", "optimum.commands.optimum_cli", "export", "openvino"),
    *("--model", SOURCE, "--task", "text-generation-with-past", "--disable-convert-tokenizer"),
)
_VLLM: Final = ("-m", "benches.peers.conversions.vllm", SOURCE, TARGET)
_LAST_LOGITS: Final = "prune_lm_head=true"
"""A prefill computes the logits of its last token only, as every other contestant does."""


@dataclass(frozen=True)
class Weights:
    """What a peer computes with for a file of a given width."""

    note: str
    conversion: tuple[str, ...] = ()
    """Arguments of its Python that convert a Hugging Face folder; none, if it reads such a folder.
    SOURCE and TARGET stand for the folders."""


FROM_GGUF: Final = frozenset({(OPENVINO, 4), (OPENVINO, 8)})
"""Peers that read a file of so many bits a weight itself."""
WEIGHTS: Final = {
    (OPENVINO, 16): Weights("fp16 weights", (*_OPENVINO, "--weight-format", "fp16", TARGET)),
    (CTRANSLATE2, 4): Weights(
        "int8 weights (it has no int4 for CPUs)", (*_CTRANSLATE2, "--quantization", "int8")
    ),
    (CTRANSLATE2, 8): Weights("int8 weights", (*_CTRANSLATE2, "--quantization", "int8")),
    (CTRANSLATE2, 16): Weights("bfloat16 weights", (*_CTRANSLATE2, "--quantization", "bfloat16")),
    (ONNXRUNTIME, 4): Weights(
        "int4 weights in blocks of 32, int8 activations",
        (*_ONNXRUNTIME, "-p", "int4", "--extra_options", "accuracy_level=4", _LAST_LOGITS),
    ),
    (ONNXRUNTIME, 8): Weights(
        "int8 weights in blocks of 32, int8 activations",
        (*_ONNXRUNTIME, "-p", "int8", "--extra_options", "accuracy_level=4", _LAST_LOGITS),
    ),
    (ONNXRUNTIME, 16): Weights(
        "float32 weights (it has no 16-bit types for CPUs)",
        (*_ONNXRUNTIME, "-p", "fp32", "--extra_options", _LAST_LOGITS),
    ),
    (VLLM, 4): Weights("int4 weights in groups of 32 (GPTQ's layout)", (*_VLLM, "gptq")),
    (VLLM, 8): Weights("int8 weights and activations (compressed-tensors)", (*_VLLM, "w8a8")),
    (VLLM, 16): Weights("bfloat16 weights"),
}
"""By peer and bits a weight."""


def weight_bits(checkpoint: Checkpoint) -> int:
    """4, 8 or 16: the width next to the file's average."""
    stored_bytes = sum(kind.stored_bytes for kind in tensor_types(checkpoint))
    average = 8 * stored_bytes / stored_numbers(checkpoint)
    return min((4, 8, 16), key=lambda bits: abs(bits - average))


class Conversions:
    """Models for peers, written to ``folder``; the Hugging Face folder is written once."""

    def __init__(self, model: Path, bits: int, folder: Path, threads: int) -> None:
        self._model = model
        self._bits = bits
        self._folder = folder
        self._threads = threads

    def weights(self, peer: str) -> Weights | None:
        """What ``peer`` computes with; None if it reads the file itself."""
        return None if (peer, self._bits) in FROM_GGUF else WEIGHTS.get((peer, self._bits))

    def model_for(self, peer: str, interpreter: Interpreter) -> Path:
        """The model that ``peer`` loads; converts it first if it must.

        Raises:
            CannotRun: the conversion failed; the message has its last words.
        """
        weights = self.weights(peer)
        if weights is None:
            return self._model
        source = self._folder / "hugging-face"
        if not source.exists():
            program = ("-m", "benches.peers.conversions.hugging_face", str(self._model))
            self._run(Interpreter(Path(sys.executable)), (*program, str(source)))
        if not weights.conversion:
            return source
        target = self._folder / peer
        names = {SOURCE: str(source), TARGET: str(target)}
        self._run(interpreter, tuple(names.get(part, part) for part in weights.conversion))
        return target

    def _run(self, interpreter: Interpreter, arguments: tuple[str, ...]) -> None:
        log = self._folder / "conversion.log"
        with log.open("w") as output:
            ended = subprocess.run(
                [str(interpreter.python), *arguments],
                env=interpreter.environment(self._threads),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
            )
        if ended.returncode:
            raise CannotRun(f"its conversion failed: {last_line(log)}")
