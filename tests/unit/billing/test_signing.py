"""Signing: a final invoice has its seller's word, under a key that everybody can look up."""

from __future__ import annotations

import stat
from typing import Any

import msgspec
import pytest

from billing.errors import Conflict, NoSigningKey
from billing.invoice import Invoice, InvoiceSigned
from billing.periods import period_at
from billing.service import Billing, Idempotency
from billing.signer import Signer
from billing.signing import SignedHead, TreeHead
from billing.store import EventStore

FOREVER = 2**62


def draft(house: Any) -> Invoice:
    house.use()
    period = period_at(house.clock.now_us)
    house.clock.now_us = period.end_us
    made = house.billing.draft_invoice("acme", period.start_us, period.end_us, usage=house.shelf, watermark_us=FOREVER)
    assert isinstance(made, Invoice)
    return made


def final(house: Any) -> SignedHead:
    signed = house.billing.finalize_invoice(draft(house).id).signed
    assert isinstance(signed, SignedHead)
    return signed


def types(house: Any) -> list[str]:
    return [row.type for row in house.billing._store.read()]


def test_finalizing_publishes_the_key_once_and_signs_what_was_cut(house: Any) -> None:
    invoice = draft(house)
    signed = house.billing.finalize_invoice(invoice.id).signed
    assert types(house)[-3:] == ["invoice.finalized", "signing_key.published", "invoice.signed"]
    head = signed.head
    assert (head.invoice_id, head.tenant, head.content_hash) == (invoice.id, "acme", invoice.content_hash)
    assert (head.root, head.tree_size) == (invoice.basis.root if invoice.basis else "", 1)
    (key,) = house.billing.signing_keys()
    assert (key.key_id, key.retired_us) == (head.key_id, None)
    assert house.billing._books.signing_keys.fault(signed) == ""
    final(house)
    assert len(house.billing.signing_keys()) == 1
    file = house.folder / "signing.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in house.folder.iterdir()] == ["signing.key"]
    again = house.restart()
    assert again.invoice(invoice.id).signed == signed
    assert again.reconcile(invoice.period_start_us, house.clock.now_us, usage=house.shelf).ok


def test_the_signed_bytes_are_fixed() -> None:
    head = TreeHead(
        invoice_id="i", tenant="t", content_hash="c", root="r", tree_size=3, key_id="k", signed_at_us=1_790_000_000
    )
    assert head.statement() == (
        b'{"content_hash":"c","invoice_id":"i","key_id":"k","object":"meterhouse.tree_head","root":"r",'
        b'"signed_at_us":1790000000,"tenant":"t","tree_size":3,"v":1}'
    )


def test_without_a_key_nothing_is_made_final(house: Any) -> None:
    invoice = draft(house)
    keyless = Billing(EventStore(house.url), base_model="base", clock=house.clock, price_lead_us=0)
    house.opened.append(keyless)
    with pytest.raises(NoSigningKey):
        keyless.finalize_invoice(invoice.id)
    house.folder.mkdir()
    (house.folder / "signing.key").write_text("-----BEGIN PRIVATE KEY-----\nMC4\n-----END PRIVATE KEY-----\n")
    with pytest.raises(NoSigningKey, match="does not hold an Ed25519 key"):
        house.billing.finalize_invoice(invoice.id)
    assert house.billing.invoice(invoice.id).status.value == "draft"
    (house.folder / "signing.key").unlink()
    assert house.billing.finalize_invoice(invoice.id).signed


def test_a_rotated_key_stays_published_and_verifies_what_it_signed(house: Any) -> None:
    first = final(house)
    rotated = house.billing.rotate_signing_key()
    second = final(house)
    assert second.head.key_id == rotated.key_id != first.head.key_id
    old, new = house.billing.signing_keys()
    assert (old.key_id, old.retired_us, new.retired_us) == (first.head.key_id, rotated.published_us, None)
    keys = house.restart()._books.signing_keys
    assert keys.fault(first) == keys.fault(second) == ""
    late = msgspec.structs.replace(first.head, signed_at_us=rotated.published_us + 1)
    assert "not in use" in keys.fault(SignedHead(head=late, signature=first.signature))


def test_a_rotation_killed_at_any_step_is_finished_by_the_next_who_signs(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = final(house)
    with monkeypatch.context() as killed:
        killed.setattr(house.billing, "_publish", None)
        with pytest.raises(TypeError):
            house.billing.rotate_signing_key()  # the next key is written down, and nothing else
    assert final(house).head.key_id == first.head.key_id
    with monkeypatch.context() as killed:
        killed.setattr(Signer, "promote", None)
        with pytest.raises(TypeError):
            house.billing.rotate_signing_key()  # it is published, and not in place
    assert len(house.billing.signing_keys()) == 2
    house.restart()
    assert final(house).head.key_id == house.billing.signing_keys()[1].key_id
    assert len(house.billing.signing_keys()) == 2
    assert [path.name for path in house.folder.iterdir()] == ["signing.key"]


def test_rotating_again_under_one_key_rotates_once(house: Any) -> None:
    once = Idempotency(key="k", payload_hash="h")
    assert house.billing.rotate_signing_key(idempotency=once) == house.billing.rotate_signing_key(idempotency=once)
    assert len(house.billing.signing_keys()) == 1
    assert final(house).head.key_id == house.billing.signing_keys()[0].key_id


def test_gateways_of_one_ledger_have_a_key_each(house: Any) -> None:
    other = Billing(
        EventStore(house.url),
        base_model="base",
        clock=house.clock,
        price_lead_us=0,
        signer=Signer(house.folder / "other.key", "other"),
    )
    house.opened.append(other)
    mine, theirs = final(house), other.finalize_invoice(draft(house).id).signed
    assert theirs is not None
    assert mine.head.key_id != theirs.head.key_id
    house.billing.refresh()
    assert [key.holder for key in house.billing.signing_keys()] == ["house", "other"]
    house.billing.rotate_signing_key()
    assert [key.retired_us is None for key in house.billing.signing_keys()] == [False, True, True]
    assert other.finalize_invoice(draft(house).id).signed.head.key_id == theirs.head.key_id


def test_a_given_key_is_read_and_another_file_is_its_rotation(house: Any) -> None:
    house.folder.mkdir()
    given = house.folder / "given.pem"
    house.billing._signer = Signer(given, "house", given=True)
    with pytest.raises(NoSigningKey):
        house.billing.finalize_invoice(draft(house).id)
    given.write_bytes(Signer(house.folder / "one", "x").key().pem())
    first = final(house)
    with pytest.raises(Conflict, match="signing_key_file"):
        house.billing.rotate_signing_key()
    given.write_bytes(Signer(house.folder / "two", "x").key().pem())
    second = final(house)
    assert first.head.key_id != second.head.key_id
    assert [key.retired_us is None for key in house.billing.signing_keys()] == [False, True]
    given.write_bytes((house.folder / "one").read_bytes())
    with pytest.raises(NoSigningKey, match="retired"):
        final(house)


def test_reconcile_finds_a_signature_that_does_not_hold(house: Any) -> None:
    signed = final(house)
    invoice = house.billing.invoice(signed.head.invoice_id)

    def differences(wrong: SignedHead) -> list[tuple[str, str]]:
        house.billing._books.invoices.apply(
            InvoiceSigned(invoice_id=invoice.id, signed=wrong), house.billing._books.seq
        )
        report = house.billing.reconcile(invoice.period_start_us, house.clock.now_us, usage=house.shelf)
        return [(one.between, one.right.partition(" ed25519")[0]) for one in report.differences]

    def head(**fields: Any) -> SignedHead:
        return SignedHead(head=msgspec.structs.replace(signed.head, **fields), signature=signed.signature)

    between = "invoice and its signature"
    assert differences(signed) == []
    assert differences(head(tree_size=2)) == [(between, "the signature is not one by the key")]
    assert differences(head(key_id="ed25519-other")) == [(between, "the key")]
    assert differences(head(content_hash="0" * 64)) == [(between, "another content was signed")]
    assert differences(SignedHead(head=signed.head, signature="?")) == [
        (between, "the signature is not one by the key")
    ]


def test_a_draft_of_a_ledger_without_documents_is_made_final_unsigned(house: Any) -> None:
    invoice = msgspec.structs.replace(draft(house), basis=None, content_hash="")
    house.billing._books.invoices.by_id[invoice.id] = invoice
    assert house.billing.finalize_invoice(invoice.id).signed is None
    assert types(house)[-1] == "invoice.finalized"


def test_a_key_is_published_once_before_it_signs(house: Any) -> None:
    for _ in range(2):
        house.billing.publish_signing_key()
    (key,) = house.billing.signing_keys()
    assert types(house).count("signing_key.published") == 1
    assert final(house).head.key_id == key.key_id
    assert types(house).count("signing_key.published") == 1
