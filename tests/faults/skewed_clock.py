"""Sets the clock of this process wrong by ``CLOCK_OFFSET_S`` seconds; only ``time.time``."""

from __future__ import annotations

import os
import time

_right = time.time
_offset_s = float(os.environ["CLOCK_OFFSET_S"])
time.time = lambda: _right() + _offset_s
