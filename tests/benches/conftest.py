"""What tests of benchmarks share."""

from __future__ import annotations

from tests.bench.conftest import printed as printed
