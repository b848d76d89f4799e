"""Tenants, keys, adapters and the idempotency of commands."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from billing.accounts import Accounts, TenantCreated, TenantStatus
from billing.errors import Conflict, IdempotencyConflict, Invalid, LedgerUnavailable, NotFound, UnknownModel
from billing.service import Idempotency
from billing.store import NewEvent


def once(key: str = "key-1", payload_hash: str = "h1", actor: str = "alice") -> Idempotency:
    return Idempotency(key=key, payload_hash=payload_hash, actor=actor)


def add(house: Any, name: str = "pirate", id: str = "load-1", tenant: str = "acme", **more: Any) -> Any:
    return house.billing.add_adapter(
        tenant, name=name, path="/adapters/x", id=id, digest="d", base_model="base", **more
    )


def test_a_tenant_is_found_again_after_a_restart(house: Any) -> None:
    made = house.billing.create_tenant(
        name="Zoë & Söhne", currency="eur", stripe_customer_id="cus_1", limits={"concurrent": 3}
    )
    assert house.restart().tenant(made.id) == made
    assert [tenant.id for tenant in house.billing.tenants()] == ["acme", made.id]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"id": "a b"}, "id"),
        ({"id": ""}, "id"),
        ({"id": "x" * 65}, "id"),
        ({"id": "a\n"}, "id"),
        ({"name": ""}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"name": " "}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"currency": "USD"}, "currency"),
        ({"currency": "xyz"}, "currency"),
        ({"stripe_customer_id": "../x"}, "stripe_customer_id"),
        ({"default_adapter": "a b"}, "default_adapter"),
        ({"limits": {"speed": 1}}, "limits.speed"),
        ({"limits": {"concurrent": 0}}, "limits.concurrent"),
        ({"limits": {"concurrent": True}}, "limits.concurrent"),
        ({"limits": {"tokens_per_minute": 10**13}}, "limits.tokens_per_minute"),
        ({"timezone": "Mars/Olympus"}, "timezone"),
        ({"timezone": "../UTC"}, "timezone"),
        ({"billing_anchor_day": 0}, "billing_anchor_day"),
        ({"billing_anchor_day": 32}, "billing_anchor_day"),
        ({"billing_anchor_day": True}, "billing_anchor_day"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(house: Any, bad: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        house.billing.create_tenant(**{"name": "ok", **bad})
    assert [fault[0] for fault in caught.value.faults] == [field]
    assert len(house.billing.tenants()) == 1


def test_a_tenant_has_its_own_periods_and_an_old_one_the_months_of_utc(house: Any) -> None:
    changed = house.billing.update_tenant("acme", timezone="Europe/Berlin", billing_anchor_day=31)
    assert (changed.timezone, changed.billing_anchor_day) == ("Europe/Berlin", 31)
    assert house.restart().tenant("acme") == changed
    old = (  # as it was written before there were periods
        '{"type":"tenant.created","tenant":{"id":"t","name":"T","currency":"usd","stripe_customer_id":null,'
        '"default_adapter":null,"limits":{},"created_us":1,"status":"active"}}'
    )
    accounts = Accounts()
    accounts.apply(msgspec.json.decode(old, type=TenantCreated))
    assert (accounts.tenant("t").timezone, accounts.tenant("t").billing_anchor_day) == ("UTC", 1)


def test_every_fault_is_told_at_once(house: Any) -> None:
    with pytest.raises(Invalid) as caught:
        house.billing.create_tenant(id="!", name="", currency="?", limits={"x": 1})
    assert [field for field, _ in caught.value.faults] == ["id", "name", "currency", "limits.x"]


def test_an_id_is_taken_once(house: Any) -> None:
    with pytest.raises(Conflict):
        house.billing.create_tenant(id="acme", name="Other")


def test_a_tenant_changes_what_may_change(house: Any) -> None:
    changed = house.billing.update_tenant("acme", name="New", limits={"concurrent": 1}, stripe_customer_id="cus_2")
    assert (changed.name, changed.limits, changed.stripe_customer_id) == ("New", {"concurrent": 1}, "cus_2")
    assert house.billing.update_tenant("acme", limits=None).limits == {}
    assert house.restart().tenant("acme").name == "New"
    for bad in ({"currency": "eur"}, {"id": "x"}, {"nonsense": 1}, {"status": "asleep"}, {"name": None}):
        with pytest.raises(Invalid):
            house.billing.update_tenant("acme", **bad)
    with pytest.raises(NotFound):
        house.billing.update_tenant("nobody", name="x")


def test_a_default_adapter_is_one_of_the_tenants(house: Any) -> None:
    house.billing.create_tenant(id="other", name="Other")
    add(house, tenant="other")
    with pytest.raises(Invalid):
        house.billing.update_tenant("acme", default_adapter="pirate")
    add(house, id="load-2")
    house.billing.update_tenant("acme", default_adapter="pirate")
    assert house.billing.resolve_model("acme", None)[0] == "pirate"
    with pytest.raises(Conflict):
        house.billing.remove_adapter("acme", "pirate")
    house.billing.update_tenant("acme", default_adapter=None)
    assert house.billing.resolve_model("acme", None) == ("base", None)
    assert house.billing.remove_adapter("acme", "pirate").id == "load-2"


def test_a_key_opens_until_it_is_revoked(house: Any) -> None:
    key, secret = house.billing.create_key("acme", "ci")
    assert len(secret) == 46
    assert secret.startswith("mh-")
    assert secret.startswith(key.prefix)
    found = house.restart().authenticate(secret)
    assert found is not None
    assert (found[0].id, found[1].id) == (key.id, "acme")
    assert house.billing.authenticate(secret + "x") is None
    assert house.billing.authenticate("") is None
    assert house.billing.authenticate("\ud800") is None
    revoked = house.billing.revoke_key(key.id)
    assert revoked.revoked_us is not None
    assert house.billing.revoke_key(key.id) == revoked
    assert house.billing.authenticate(secret) is None
    assert house.restart().authenticate(secret) is None
    assert [one.id for one in house.billing.keys("acme")] == [key.id]


def test_no_secret_is_kept_anywhere(house: Any) -> None:
    _, secret = house.billing.create_key("acme", "ci", idempotency=once())
    rows = house.billing._store.read()
    assert secret.encode() not in msgspec.json.encode(rows)
    assert hashlib.sha256(secret.encode()).hexdigest() in rows[-1].payload


def test_a_suspended_tenants_keys_open_nothing(house: Any) -> None:
    _, secret = house.billing.create_key("acme", "ci")
    house.billing.update_tenant("acme", status="suspended")
    assert house.billing.authenticate(secret) is None
    house.billing.update_tenant("acme", status=TenantStatus.ACTIVE)
    assert house.billing.authenticate(secret) is not None


def test_another_tenants_adapter_is_as_unknown_as_any(house: Any) -> None:
    house.billing.create_tenant(id="other", name="Other")
    record = add(house)
    assert house.billing.resolve_model("acme", "pirate") == ("pirate", record)
    assert house.billing.resolve_model("other", "base") == ("base", None)
    texts = []
    for name in ("pirate", "nothing"):
        with pytest.raises(UnknownModel) as caught:
            house.billing.resolve_model("other", name)
        texts.append(str(caught.value).replace(name, "X"))
    assert texts[0] == texts[1]


def test_a_name_means_its_newest_load(house: Any) -> None:
    add(house, id="load-1")
    newer = add(house, id="load-2")
    assert house.billing.resolve_model("acme", "pirate") == ("pirate", newer)
    assert house.restart().adapters("acme") == [newer]
    assert house.billing.adapters() == [newer]
    with pytest.raises(Conflict):
        add(house, name="another", id="load-2")


@pytest.mark.parametrize("name", ["base", "", "a b", "x" * 65, "*", "a\\b"])
def test_an_adapters_name_is_sane_and_not_the_base_models(house: Any, name: str) -> None:
    with pytest.raises(Invalid):
        add(house, name=name)
    assert house.billing.adapters() == []


def test_the_same_key_and_payload_give_the_first_result(either_house: Any) -> None:
    house = either_house
    made = house.billing.create_tenant(name="One", idempotency=once())
    house.billing.update_tenant(made.id, name="Changed")
    assert house.billing.create_tenant(name="One", idempotency=once()) == made
    assert house.restart().create_tenant(name="One", idempotency=once()) == made
    assert len(house.billing.tenants()) == 2
    assert house.billing._store.find("command:key-1").actor == "alice"


def test_the_same_key_with_another_payload_or_command_is_refused(house: Any) -> None:
    house.billing.create_tenant(name="One", idempotency=once())
    with pytest.raises(IdempotencyConflict):
        house.billing.create_tenant(name="Two", idempotency=once(payload_hash="h2"))
    with pytest.raises(IdempotencyConflict):
        house.billing.create_key("acme", "ci", idempotency=once())
    assert len(house.billing.tenants()) == 2
    assert house.billing.keys("acme") == []


def test_a_refused_command_does_not_use_up_its_key(house: Any) -> None:
    with pytest.raises(Invalid):
        house.billing.create_tenant(name="", idempotency=once())
    assert house.billing.create_tenant(name="One", idempotency=once()).name == "One"


def test_a_replayed_key_creation_does_not_show_the_secret(house: Any) -> None:
    key, secret = house.billing.create_key("acme", "ci", idempotency=once())
    assert secret is not None
    assert house.billing.create_key("acme", "ci", idempotency=once()) == (key, None)
    assert len(house.billing.keys("acme")) == 1


def test_every_command_is_idempotent(house: Any) -> None:
    before = house.billing.create_tenant(name="One", idempotency=once("t"))
    commands: list[Any] = [
        lambda: house.billing.update_tenant("acme", name="N", idempotency=once("u")),
        lambda: add(house, idempotency=once("a")),
        lambda: house.billing.grant_credit("acme", "5", "usd", "trial", idempotency=once("c")),
        lambda: house.billing.set_price(
            model="x",
            effective_at_us=0,
            currency="usd",
            per_million={"prompt": "1", "cached": "1", "completion": "1"},
            idempotency=once("p"),
        ),
        lambda: house.billing.revoke_key(key.id, idempotency=once("r")),
        lambda: house.billing.remove_adapter("acme", "pirate", idempotency=once("d")),
    ]
    key, _ = house.billing.create_key("acme", "ci")
    for command in commands:
        first = command()
        count = len(house.billing._store.read())
        assert command() == first
        assert len(house.billing._store.read()) == count
    assert before.name == "One"


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb"])
def test_an_idempotency_key_is_bounded(house: Any, key: str) -> None:
    with pytest.raises(Invalid):
        house.billing.create_tenant(name="One", idempotency=once(key))


def test_lists_are_paged(house: Any) -> None:
    ids = ["acme"] + [house.billing.create_tenant(name=f"T{i}").id for i in range(4)]
    assert [one.id for one in house.billing.tenants(limit=2)] == ids[:2]
    assert [one.id for one in house.billing.tenants(limit=2, after=ids[1])] == ids[2:4]
    assert house.billing.tenants(after=ids[-1]) == []
    for bad in ({"limit": 0}, {"limit": 10_001}, {"after": "nobody"}):
        with pytest.raises(Invalid):
            house.billing.tenants(**bad)


def test_another_process_sees_it_after_refresh(either_house: Any) -> None:
    house = either_house
    other = house.open()
    made = house.billing.create_tenant(name="One")
    with pytest.raises(NotFound):
        other.tenant(made.id)
    other.refresh()
    assert other.tenant(made.id) == made
    # A command sees what stands without being told to look.
    house.billing.create_tenant(id="two", name="Two")
    with pytest.raises(Conflict):
        other.create_tenant(id="two", name="Too late")


@pytest.mark.parametrize("payload", ['{"type":"from.the.future"}', '{"type":"key.created"}', "no json"])
def test_a_ledger_that_this_version_does_not_understand_is_not_served(house: Any, payload: str) -> None:
    with house.billing._store.exclusive() as log:
        log.append([NewEvent(stream="x", type="t", payload=payload)], actor="a", time_us=1)
    with pytest.raises(LedgerUnavailable, match="does not understand event 3"):
        house.restart()
