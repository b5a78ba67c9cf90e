"""How a model's makers sample from it: ``generation_config.json``, or ``general.sampling.*`` of a
GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llorch_worker.contract.generation_config import GenerationConfig, checked

_IN_FOLDER = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The fields that vLLM takes, by our names. ``do_sample`` is not read, as there: a request that is
to be greedy says so."""
_GGUF = "general.sampling."
_IN_GGUF = {
    f"{_GGUF}temp": "temperature",
    f"{_GGUF}top_p": "top_p",
    f"{_GGUF}top_k": "top_k",
    f"{_GGUF}min_p": "min_p",
    f"{_GGUF}penalty_repeat": "repetition_penalty",
}
"""llama.cpp's keys, by our names."""
_LAST_N = f"{_GGUF}penalty_last_n"
"""How many tokens llama.cpp's penalty looks back; ours looks at all. 0 is off."""
_NOT_DONE = {
    f"{_GGUF}mirostat": 0,
    f"{_GGUF}xtc_probability": 0,
    "typical_p": 1,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "penalty_alpha": 0,
}
"""Ways to sample that are not done here, and the values that turn them off."""


def read_generation_config(metadata: Mapping[str, Any]) -> tuple[GenerationConfig, list[str]]:
    """What the files say, and a sentence for each value that is ignored.

    ``metadata``: GGUF key/values, or config.json with generation_config inside it. As in vLLM, a
    folder without generation_config.json may have the values in config.json.
    """
    is_gguf = any(name.startswith("general.") for name in metadata)
    said = metadata if is_gguf else metadata.get("generation_config", metadata)
    said = said if isinstance(said, Mapping) else {}
    names = _IN_GGUF if is_gguf else _IN_FOLDER
    theirs = {ours: name for name, ours in names.items()}
    given = {ours: said[name] for name, ours in names.items() if said.get(name) is not None}
    if is_gguf:
        # Stored in 32 bits: 0.6 reads as 0.6000000238.
        given = {n: float(f"{v:.6g}") if isinstance(v, float) else v for n, v in given.items()}
        if said.get(_LAST_N) == 0:
            given.pop("repetition_penalty", None)
    valid, faulty = checked(given)
    ignored = [
        f"the model's {theirs[name]} is ignored: {fault.removeprefix(f'{name}: ')}"
        for name, fault in faulty.items()
    ]
    ignored += [
        f"the model's {name} is ignored: there is no such sampling here"
        for name, off in _NOT_DONE.items()
        if said.get(name) not in (None, off)
    ]
    return valid, ignored
