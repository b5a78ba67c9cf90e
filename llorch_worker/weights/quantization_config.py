"""What ``quantization_config`` of a folder says about the layout of its weights.

What cannot be unpacked is refused by its key. How activations are rounded is not: products here
keep them as they are, or round them as those of any other quantised matrix.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llorch_worker.contract import ModelLoadFailed

_FLOATS: Final = ("float-quantized", "naive-quantized")
_METHODS: Final[dict[str, dict[str, tuple[object, ...]]]] = {
    "awq": {
        **dict.fromkeys(("bits", "w_bit"), (4,)),
        **dict.fromkeys(("version", "format", "checkpoint_format"), ("gemm",)),
        "zero_point": (True,),
    },
    "gptq": {
        "bits": (4,),
        **dict.fromkeys(("format", "checkpoint_format"), ("gptq", "gptq_v2")),
        "sym": (True, False),
        "is_marlin_format": (False,),
        "pack_dtype": ("int32",),
    },
    "fp8": {"fmt": ("e4m3",), "scale_fmt": ("float",), "kv_cache_scheme": (None,)},
    "compressed-tensors": {
        "format": _FLOATS,
        "kv_cache_scheme": (None,),
        "sparsity_config": (None, {}, {"format": "dense"}),
        "transform_config": (None, {}),
    },
}
"""For each ``quant_method`` the values of keys that decide about the layout; null is always one.
Other keys change nothing here: which tensors are quantised is seen from the tensors."""
_WEIGHTS: Final[dict[str, tuple[object, ...]]] = {
    "type": ("float",),
    "num_bits": (8,),
    "strategy": ("tensor", "channel", "block"),
    "symmetric": (True,),
}
"""The same for ``weights`` of a group of compressed-tensors."""


@dataclass(frozen=True)
class QuantizationConfig:
    """How the quantised tensors of a folder are laid out."""

    method: str
    group: int = -1
    """Columns that share a scale, in types of 4 bits; -1 for all."""
    lowered_zeros: bool = False
    """Zero points are stored minus 1, as GPTQ's first format does."""
    symmetric: bool | None = False
    """Zero points are 8, whichever format they are stored in; None where the file does not say."""
    reordered: bool = False
    """A tensor says to which group each column belongs."""
    blocks: frozenset[tuple[int, int]] = frozenset()
    """Rows and columns that share a scale, in FP8; -1 for all."""


def read_quantization_config(path: Path, config: object) -> QuantizationConfig:
    """Raises ModelLoadFailed, with the key, for a layout that cannot be unpacked."""
    given = _object(path, "", config)
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise _refused(path, "quant_method", method, tuple(_METHODS))
    _check(path, "", given, _METHODS[method])
    if method in ("awq", "gptq"):
        return _four_bits(path, method, given)
    if method == "compressed-tensors":
        return QuantizationConfig(method, blocks=frozenset(_compressed(path, given)))
    block = _block(path, given.get("weight_block_size") or [-1, -1])
    return QuantizationConfig(method, blocks=frozenset([block]))


def _four_bits(path: Path, method: str, given: Mapping[str, Any]) -> QuantizationConfig:
    group = given.get("group_size", given.get("q_group_size", 128))
    if not isinstance(group, int) or (group != -1 and group < 1):
        raise _refused(path, "group_size", group, (-1, 32, 64, 128))
    symmetric = given.get("sym")
    rules: dict[str, tuple[object, ...]] = {"bits": (4,), "group_size": (group,)}
    if symmetric is not None:
        rules["sym"] = (symmetric,)
    for key, module in _object(path, "dynamic", given.get("dynamic") or {}).items():
        _check(path, f"dynamic.{key}.", _object(path, f"dynamic.{key}", module), rules)
    if method == "awq":
        return QuantizationConfig(method, group)
    formats = {str(given[key]).lower() for key in ("checkpoint_format", "format") if given.get(key)}
    if len(formats) > 1:
        raise _refused(path, "format", given["format"], (given["checkpoint_format"],))
    return QuantizationConfig(
        method, group, formats != {"gptq_v2"}, symmetric, bool(given.get("desc_act"))
    )


def _compressed(path: Path, given: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """The blocks of all groups of compressed-tensors."""
    for key, group in _object(path, "config_groups", given.get("config_groups") or {}).items():
        at = f"config_groups.{key}"
        _check(path, f"{at}.", _object(path, at, group), {"format": _FLOATS})
        weights = _object(path, f"{at}.weights", group.get("weights"))
        _check(path, f"{at}.weights.", weights, _WEIGHTS)
        by_strategy = {"channel": [1, -1], "block": weights.get("block_structure")}
        yield _block(path, by_strategy.get(str(weights.get("strategy")), [-1, -1]))


def _check(
    path: Path, at: str, given: Mapping[str, Any], rules: Mapping[str, tuple[object, ...]]
) -> None:
    for key, allowed in rules.items():
        value = given.get(key)
        value = value.lower() if isinstance(value, str) else value
        if value is not None and value not in allowed:
            raise _refused(path, at + key, value, allowed)


def _object(path: Path, key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refused(path, key, value, ({},))
    return value


def _block(path: Path, sizes: object) -> tuple[int, int]:
    match sizes:
        case [int(rows), int(columns)] if 0 not in (rows, columns) and min(sizes) >= -1:
            return rows, columns
    raise _refused(path, "the size of blocks", sizes, ([128, 128],))


def _refused(path: Path, key: str, value: object, allowed: tuple[object, ...]) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{path}: {key or 'it'} in quantization_config is {json.dumps(value)[:50]}, but only "
        f"{' or '.join(map(json.dumps, allowed))} can be unpacked; serve the model unquantised, as "
        "GGUF, or in one of the layouts that docs/FAMILIES.md lists."
    )
