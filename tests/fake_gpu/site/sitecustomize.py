"""Simulates cards in processes that have this folder on their module path.

As a CUDA build does, torch sees the cards that ``CUDA_VISIBLE_DEVICES`` names when it is imported.
The worker runs the toy engine, because a simulated card holds no tensors. All else is real.
"""

import importlib.abc
import importlib.util
import os
import sys
from types import SimpleNamespace


def _after_torch(torch):
    import pynvml

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = pynvml._cards()
    if named is not None:
        known = {card["uuid"]: card for card in cards} | {str(i): c for i, c in enumerate(cards)}
        cards = [known[name] for name in named.split(",") if name]
    torch.version.cuda = "0.0"
    torch.cuda.is_available = lambda: bool(cards)
    torch.cuda.device_count = lambda: len(cards)
    torch.cuda.mem_get_info = lambda device=0: (cards[0]["free"], cards[0]["total"])
    torch.cuda.get_device_properties = lambda device=0: SimpleNamespace(
        uuid=(cards[0]["uuid"] or "").removeprefix("GPU-"),
        multi_processor_count=132,
        shared_memory_per_block_optin=227 * 1024,
    )
    torch.cuda.get_device_capability = lambda device=0: (9, 0)


def _after_celery_app(module):
    module.LlorchApp.engine_class = "tests.toy_engine:ToyEngine"


_HOOKS = {"torch": _after_torch, "llorch_worker.worker.celery.app": _after_celery_app}


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self._busy = False

    def find_spec(self, name, path=None, target=None):
        if name not in _HOOKS or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _HOOKS[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
