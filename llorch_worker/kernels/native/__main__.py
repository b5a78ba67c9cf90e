"""``python -m llorch_worker.kernels.native [VARIANT ...]`` compiles kernels ahead.

Without arguments: all variants of this architecture, for an image that many processors will run. It
prints the libraries.
"""

from __future__ import annotations

import argparse
import os
import platform
from concurrent.futures import ThreadPoolExecutor

from llorch_worker.kernels.native.build import CannotBuild, built
from llorch_worker.kernels.native.variants import VARIANTS, variants_of

parser = argparse.ArgumentParser(prog="python -m llorch_worker.kernels.native")
parser.add_argument("variants", nargs="*", metavar="VARIANT", help=", ".join(VARIANTS))
variants = parser.parse_args().variants or variants_of(platform.machine())
for wanted in variants:
    if wanted not in VARIANTS:
        parser.error(f"unknown variant {wanted!r}; allowed: {', '.join(VARIANTS)}")
try:
    # A variant has one source that takes longer than all others, so variants go side by side, too.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        print(*pool.map(built, variants), sep="\n")
except CannotBuild as reason:
    parser.exit(1, f"error: {reason}\n")
