"""Reads what Prometheus would read."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]

STRANGE = [
    "application/openmetrics-text; version=abc",
    "application/openmetrics-text; version=1.x",
    "text/plain; version=abc",
]
"""Headers ``Accept`` that prometheus_client cannot compare with its versions."""


@dataclass(frozen=True)
class Scrape:
    """The samples of one answer, by name and labels."""

    samples: dict[tuple[str, Labels], float]
    text: str

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all samples of ``name`` that have at least these labels."""
        wanted = set(labels.items())
        found = [v for (n, has), v in self.samples.items() if n == name and wanted <= has]
        assert found, f"no {name} with {labels}"
        return sum(found)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.samples}


def parse(text: str) -> Scrape:
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            place = sample.name, frozenset(sample.labels.items())
            assert place not in samples, f"{place} is there twice"
            samples[place] = sample.value
    return Scrape(samples, text)


def scrape(address: str, **options: object) -> Scrape:
    """``address`` is ``host:port``, or the URL of a server that has /metrics."""
    url = address if address.startswith("http") else f"http://{address}"
    answer = httpx.get(f"{url}/metrics", timeout=30, **options)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    return parse(answer.text)
