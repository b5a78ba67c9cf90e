"""The seed decides load and kills, and the kills keep their shares."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from benches.battle.ledger import CANCELLED, POISON, STOCK
from benches.battle.mixture import LONGEST_COUNTDOWN_S, SHARES, WAYS_TO_CANCEL, mixed
from benches.battle.schedule import orders, strikes


def test_the_seed_decides_everything() -> None:
    assert strikes(1, 50, 60) == strikes(1, 50, 60) != strikes(2, 50, 60)
    first, again, other = (list(islice(orders(seed, 4.0), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_the_mixture_has_every_kind_in_its_share_and_sends_each_job_once() -> None:
    parcels = list(islice(mixed(orders(1, 4.0), 1), 4000))
    assert parcels == list(islice(mixed(orders(1, 4.0), 1), 4000))
    assert parcels != list(islice(mixed(orders(1, 4.0), 2), 4000))
    jobs = [order.job for parcel in parcels for order in parcel]
    assert len({job.id for job in jobs}) == len(jobs)
    counts = Counter(
        "chord" if len(parcel) > 2
        else "chain" if len(parcel) == 2
        else "poison" if parcel[0].job.kind == POISON
        else "cancel" if parcel[0].job.kind == CANCELLED
        else "countdown" if parcel[0].countdown_s
        else "ours" if parcel[0].ours is not None
        else "plain"
        for parcel in parcels
    )  # fmt: skip
    for kind, share in SHARES.items():
        assert counts[kind] == pytest.approx(4000 * share, rel=0.5)


def test_chords_and_chains_end_in_ours_or_stock_and_some_parts_are_cancelled() -> None:
    parcels = list(islice(mixed(orders(1, 4.0), 1), 1000))
    canvases = [parcel for parcel in parcels if len(parcel) > 1]
    for *parts, last in canvases:
        assert last.job.after == tuple(part.job.id for part in parts)
    assert {last.job.kind for *_, last in canvases} == {STOCK, "plain"}
    for order in (order for parcel in canvases for order in parcel if order.cancel):
        assert order.cancel.after_s < LONGEST_COUNTDOWN_S == order.countdown_s
    alone = [parcel[0] for parcel in parcels if len(parcel) == 1 and parcel[0].cancel]
    assert {order.cancel.how for order in alone} == set(WAYS_TO_CANCEL)
    assert {bool(order.countdown_s) for order in alone} == {True, False}
    assert {order.poison for (order, *_) in parcels if order.poison} == {"die", "die at 40"}
