"""`GET /.well-known/meterhouse-signing-keys.json`: the public keys that sign invoices, for everybody.

A JSON Web Key Set (RFC 7517) of Ed25519 keys (RFC 8037), retired ones too: an invoice is verified for ever.
`published_us` and `retired_us` say in which time a key signs.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency
from msgspec import Meta

from billing.signing import PublicKey
from gateway.openai.edge import Edge

PATH = "/.well-known/meterhouse-signing-keys.json"
MAX_AGE_S = 300


class SigningKey(msgspec.Struct, kw_only=True):
    """One key, as a JSON Web Key; times are microseconds since the epoch."""

    kid: str
    x: Annotated[str, Meta(description="base64url of the 32 bytes")]
    published_us: int
    retired_us: int | None
    kty: Literal["OKP"] = "OKP"
    crv: Literal["Ed25519"] = "Ed25519"
    use: Literal["sig"] = "sig"


class SigningKeySet(msgspec.Struct, kw_only=True):
    """Every key ever published, in that order."""

    keys: list[SigningKey]


def key_set(keys: list[PublicKey]) -> SigningKeySet:
    return SigningKeySet(
        keys=[
            SigningKey(kid=key.key_id, x=key.public_key, published_us=key.published_us, retired_us=key.retired_us)
            for key in keys
        ]
    )


@get(PATH, tags=["Billing"], sync_to_thread=False)
def signing_keys(edge: NamedDependency[Edge]) -> Response[SigningKeySet]:
    """Show the public keys that sign invoices, retired ones too."""
    return Response(key_set(edge.billing.signing_keys()), headers={"cache-control": f"public, max-age={MAX_AGE_S}"})
