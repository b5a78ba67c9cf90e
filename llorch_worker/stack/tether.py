"""Runs a program that must not outlive the process that started it.

It runs by path with ``python -I -S``, so it imports only the standard library. On Linux the kernel
sends the given signal when the parent dies for any reason; the setting survives exec. On other
systems it only starts the program.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """``tether.py <signal> <parent pid> <program> [argument...]``."""
    death_signal, parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(death_signal))
        # The parent may have died before prctl took effect.
        if os.getppid() != int(parent_pid):
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
