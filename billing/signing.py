"""Signed tree heads: what the seller says of an invoice, under a key that everybody can look up (Ed25519, RFC 8032).

The statement is the canonical JSON of a `TreeHead`: which invoice, the hash of its document, the root over its events
and how many there are, the key, and when. Public keys are facts of the ledger and stay published for ever, each with
the time in which it signed; the private halves are `signer.py`'s.

Pure. Does not know: where private keys are kept, what a document says.
"""

from __future__ import annotations

import base64
import hashlib

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_encoder = msgspec.json.Encoder(order="sorted")


class TreeHead(msgspec.Struct, frozen=True, kw_only=True):
    """What is signed. Its bytes never change; `object` and `v` say that it is nothing else that could be signed."""

    object: str = "meterhouse.tree_head"
    v: int = 1
    invoice_id: str
    tenant: str
    content_hash: str
    root: str
    tree_size: int
    key_id: str
    signed_at_us: int

    def statement(self) -> bytes:
        """The signed bytes: JSON, keys sorted, no spaces."""
        return _encoder.encode(self)


class SignedHead(msgspec.Struct, frozen=True, kw_only=True):
    """A head and its signature, base64url without padding."""

    head: TreeHead
    signature: str


class PublicKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that signs, or signed until `retired_us`. `holder`: the data folder that has, or had, the private half."""

    key_id: str
    public_key: str  # base64url of the 32 bytes
    holder: str
    published_us: int
    retired_us: int | None = None


class SigningKeyPublished(msgspec.Struct, frozen=True, kw_only=True, tag="signing_key.published"):
    """From here on the key signs, and the one that it replaces does no more."""

    key_id: str
    public_key: str
    holder: str
    at_us: int
    replaces: str = ""


class SigningKeys:
    """Every key ever published, in that order."""

    def __init__(self) -> None:
        self.by_id: dict[str, PublicKey] = {}

    def apply(self, fact: SigningKeyPublished) -> None:
        if fact.replaces:
            replaced = self.by_id[fact.replaces]
            self.by_id[fact.replaces] = msgspec.structs.replace(replaced, retired_us=fact.at_us)
        self.by_id[fact.key_id] = PublicKey(
            key_id=fact.key_id, public_key=fact.public_key, holder=fact.holder, published_us=fact.at_us
        )

    def standing(self, holder: str) -> PublicKey | None:
        """The holder's key that is not retired."""
        of_holder = (key for key in self.by_id.values() if key.holder == holder and key.retired_us is None)
        return next(of_holder, None)

    def fault(self, signed: SignedHead) -> str:
        """Why a signed head does not hold; empty: it does."""
        key = self.by_id.get(signed.head.key_id)
        if key is None:
            return f"the key {signed.head.key_id} was never published"
        if not key.published_us <= signed.head.signed_at_us <= (key.retired_us or signed.head.signed_at_us):
            return f"the key {key.key_id} was not in use then"
        try:
            public = Ed25519PublicKey.from_public_bytes(from_base64(key.public_key))
            public.verify(from_base64(signed.signature), signed.head.statement())
        except (InvalidSignature, ValueError):
            return f"the signature is not one by the key {key.key_id}"
        return ""


def key_id_of(public: bytes) -> str:
    """The id of a public key: it cannot be another's."""
    return f"ed25519-{hashlib.sha256(public).hexdigest()[:32]}"


def to_base64(data: bytes) -> str:
    """Base64url without padding (RFC 7515, section 2)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_base64(text: str) -> bytes:
    """Inverse of `to_base64`. Raises `ValueError`."""
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
