"""Signing: the heads of final invoices, and the keys that sign them.

A key is published when a gateway begins to serve, by its rotation, or at the latest in the transaction of the first
invoice that it signs; no signature stands in the ledger without its key. Raises `NoSigningKey` where this process has
none that may sign.
"""

from __future__ import annotations

from billing.books import new_event
from billing.errors import NoSigningKey
from billing.invoice import Invoice, InvoiceSigned
from billing.service.shell import Idempotency, Shell
from billing.signer import Signer, SigningKey
from billing.signing import PublicKey, SignedHead, SigningKeyPublished, TreeHead
from billing.store import NewEvent


class SigningService(Shell):
    """Whose word an invoice is."""

    def signing_keys(self) -> list[PublicKey]:
        """Every key ever published, in that order."""
        with self._state:
            return list(self._books.signing_keys.by_id.values())

    def publish_signing_key(self) -> None:
        """Let tenants know this process's key before it signs for the first time; again does nothing."""
        signer = self._own_signer()

        def decide(time_us: int) -> tuple[list[NewEvent], None]:
            key = self._usable(signer)
            known = key.id in self._books.signing_keys.by_id
            return [] if known else [self._publish(signer, key, time_us)[1]], None

        self._command("publish_signing_key", None, type(None), decide)

    def rotate_signing_key(self, *, idempotency: Idempotency | None = None) -> PublicKey:
        """Let a new key take the place of this process's; safe to repeat after any failure."""
        signer = self._own_signer()

        def decide(time_us: int) -> tuple[list[NewEvent], PublicKey]:
            following = signer.following()
            standing = self._books.signing_keys.by_id.get(following.id)
            if standing is not None:  # published before a kill: only its place is left to be taken
                return [], standing
            published, row = self._publish(signer, following, time_us)
            return [row], published

        rotated = self._command("rotate_signing_key", idempotency, PublicKey, decide)[0]
        signer.promote(rotated.key_id)
        return rotated

    def _signed(self, invoice: Invoice, time_us: int) -> tuple[list[NewEvent], SignedHead]:
        """The facts that sign an invoice with a basis; the log is held."""
        signer = self._own_signer()
        key = self._usable(signer)
        rows = []
        if key.id not in self._books.signing_keys.by_id:
            rows.append(self._publish(signer, key, time_us)[1])
        assert invoice.basis is not None
        head = TreeHead(
            invoice_id=invoice.id,
            tenant=invoice.tenant,
            content_hash=invoice.content_hash,
            root=invoice.basis.root,
            tree_size=invoice.event_count,
            key_id=key.id,
            signed_at_us=time_us,
        )
        signed = SignedHead(head=head, signature=key.sign(head.statement()))
        rows.append(new_event(f"invoice:{invoice.id}", InvoiceSigned(invoice_id=invoice.id, signed=signed)))
        return rows, signed

    def _own_signer(self) -> Signer:
        if self._signer is None:
            raise NoSigningKey("there is no key here to sign with")
        return self._signer

    def _usable(self, signer: Signer) -> SigningKey:
        """The file's key, unless it is retired; then the one that was to follow it when a rotation was cut short."""
        keys = self._books.signing_keys.by_id
        key = signer.key()
        if key.id in keys and keys[key.id].retired_us is not None:
            standing = self._books.signing_keys.standing(signer.holder)
            if standing is not None:
                signer.promote(standing.key_id)
                key = signer.key()
        if key.id in keys and keys[key.id].retired_us is not None:
            raise NoSigningKey("the signing key here is retired: rotate it, or give another")
        return key

    def _publish(self, signer: Signer, key: SigningKey, time_us: int) -> tuple[PublicKey, NewEvent]:
        replaced = self._books.signing_keys.standing(signer.holder)
        fact = SigningKeyPublished(
            key_id=key.id,
            public_key=key.public_key,
            holder=signer.holder,
            at_us=time_us,
            replaces="" if replaced is None else replaced.key_id,
        )
        published = PublicKey(
            key_id=key.id, public_key=key.public_key, holder=signer.holder, published_us=time_us, retired_us=None
        )
        return published, new_event("signing_keys", fact)
