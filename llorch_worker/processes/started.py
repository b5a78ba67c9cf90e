"""The first lines of a process that a keeper started: it ends with the keeper.

It runs by path, before anything but the standard library can be imported: ``started.py <keeper's
pid> <module> [descriptor...]``. Then it calls ``main(*descriptors)`` of the module.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from importlib import import_module

PATH_VARIABLE = "_LLORCH_KEEPER_PATH"
PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those that end a worker are the keeper's to obey: it drains, and then ends this process. A
service manager sends them to all processes of a unit."""


def main() -> None:
    keeper, module, *numbers = sys.argv[1:]
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The keeper may have died before. Elsewhere the end of the connection says so.
    if os.getppid() != int(keeper):
        os._exit(1)
    descriptors = [int(number) for number in numbers]
    for descriptor in descriptors:
        # A compiler that this process starts must not keep them.
        os.set_inheritable(descriptor, False)
    sys.path[:] = json.loads(os.environ.pop(PATH_VARIABLE))
    import_module(module).main(*descriptors)


if __name__ == "__main__":
    main()
