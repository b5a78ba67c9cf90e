"""Which devices ``llorch up`` puts workers on."""

from __future__ import annotations

import subprocess

from llorch_worker.cli.children import python
from llorch_worker.cli.errors import usage_error

_COUNT_GPUS = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
_COUNT_TIMEOUT_S = 120


def worker_devices(
    device: str, devices: str | None, workers: int | None
) -> tuple[tuple[str, str], ...]:
    """(name, device) of each worker.

    ``devices`` is a list as given, ``cuda:0,cuda:1``; without it ``device`` (``auto``: every GPU,
    else the CPU) is used for as many ``workers`` as wanted.

    Raises:
        CommandError: for an empty name in the list, or a count that disagrees with it.
    """
    if devices is not None:
        chosen = [part.strip() for part in devices.split(",")]
        if not all(chosen):
            raise usage_error(f"--devices {devices!r} has an empty name: give cuda:0,cuda:1 or cpu")
        if workers is not None and workers != len(chosen):
            raise usage_error(
                f"--devices names {len(chosen)} and --workers says {workers}: give one of them"
            )
    elif device in ("auto", "cuda"):
        gpus = gpu_count()
        available = [f"cuda:{index}" for index in range(gpus)] or [
            "cpu" if device == "auto" else device
        ]
        count = workers or len(available)
        chosen = [available[index % len(available)] for index in range(count)]
    else:
        chosen = [device] * (workers or 1)
    if len(chosen) == 1:
        return (("worker", chosen[0]),)
    return tuple((f"worker-{index}", name) for index, name in enumerate(chosen))


def gpu_count() -> int:
    """How many GPUs torch may use here; 0 without asking torch where there is no driver."""
    if not _nvidia_driver_answers():
        return 0
    # In a process of its own: a CUDA context here would take memory from the workers.
    counted = subprocess.run(
        python("-c", _COUNT_GPUS),
        capture_output=True,
        text=True,
        timeout=_COUNT_TIMEOUT_S,
        check=False,
    )
    return int(counted.stdout) if counted.returncode == 0 else 0


def _nvidia_driver_answers() -> bool:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True
