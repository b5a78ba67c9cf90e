"""Every tensor that a model or a cache keeps, wherever it keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

_OURS = __name__.partition(".")[0]


def resident_tensors(root: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors below ``root``, each once, by the attributes that lead to it.

    Walks objects of this package and plain containers. What a layer keeps is found without the
    layer's help, so a new kind of layer cannot be forgotten.
    """
    seen: set[int] = set()

    def walk(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        if id(value) in seen:
            return
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            yield path, value
            return
        # The root may be anything that stands for a model, a watched one say.
        children = _children(value, any_class=value is root)
        if children:
            seen.add(id(value))
            for key, child in children:
                yield from walk(child, f"{path}.{key}" if path else key)

    yield from walk(root, name)


def storage_bytes(root: Any) -> int:
    """Bytes that the tensors below ``root`` take, views of one memory counted once."""
    storages = {}
    for _, tensor in resident_tensors(root):
        storage = tensor.untyped_storage()
        storages[(tensor.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def _children(value: Any, *, any_class: bool) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(str(index), child) for index, child in enumerate(value)]
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if not any_class and type(value).__module__.partition(".")[0] != _OURS:
        return []
    found = dict(getattr(value, "__dict__", {}))
    if is_dataclass(value):
        found |= {field.name: getattr(value, field.name) for field in fields(value)}
    for cls in type(value).__mro__:
        for slot in getattr(cls, "__slots__", ()):
            if hasattr(value, slot):
                found[slot] = getattr(value, slot)
    return list(found.items())
