from __future__ import annotations

import msgspec

from billing.daily import DAY_US, KEPT_DAYS, DailyCharges
from billing.ledger import UsageRated

DAY = 20_000
RATED = UsageRated(
    event_id="e",
    event_hash="h",
    ts_us=DAY * DAY_US,
    settled_us=0,
    tenant="acme",
    model="base",
    adapter="",
    prompt_tokens=10,
    cached_tokens=0,
    completion_tokens=5,
    price_id="p",
    amount_femto=str(10**19 + 1),
    key_id="k1",
)


def charged(daily: DailyCharges, day: int, tenant: str | None = None) -> list[tuple[str, str, str, int, int, int]]:
    return [
        (one.tenant, one.key_id, one.model, one.requests, one.tokens, one.amount_femto)
        for one in daily.of_day(day * DAY_US, tenant)
    ]


def test_charges_are_summed_exactly_by_day_tenant_key_and_model() -> None:
    daily = DailyCharges()
    last = msgspec.structs.replace(RATED, ts_us=(DAY + 1) * DAY_US - 1)
    for rated in (
        RATED,
        last,
        msgspec.structs.replace(RATED, key_id=""),
        msgspec.structs.replace(RATED, tenant="globex"),
    ):
        daily.apply(rated)
    daily.apply(msgspec.structs.replace(RATED, ts_us=(DAY + 1) * DAY_US))
    assert charged(daily, DAY) == [
        ("acme", "k1", "base", 2, 30, 2 * 10**19 + 2),
        ("acme", "", "base", 1, 15, 10**19 + 1),
        ("globex", "k1", "base", 1, 15, 10**19 + 1),
    ]
    assert charged(daily, DAY, "globex") == [("globex", "k1", "base", 1, 15, 10**19 + 1)]
    assert len(charged(daily, DAY + 1)) == 1
    assert charged(daily, DAY + 2) == []
    assert daily.kept_from_us == 0, "nothing was forgotten"


def test_what_is_older_than_is_kept_is_forgotten_and_said_to_be() -> None:
    daily = DailyCharges()
    daily.apply(RATED)
    daily.apply(msgspec.structs.replace(RATED, ts_us=(DAY + KEPT_DAYS - 1) * DAY_US))
    assert len(charged(daily, DAY)) == 1
    assert daily.kept_from_us == 0
    daily.apply(msgspec.structs.replace(RATED, ts_us=(DAY + KEPT_DAYS) * DAY_US))
    assert charged(daily, DAY) == []
    assert daily.kept_from_us == (DAY + 1) * DAY_US
    daily.apply(RATED)  # days late, and older than anything that is kept
    assert charged(daily, DAY) == []
    late = DailyCharges()
    late.apply(msgspec.structs.replace(RATED, ts_us=(DAY + KEPT_DAYS) * DAY_US))
    late.apply(RATED)
    assert late.kept_from_us == (DAY + 1) * DAY_US
