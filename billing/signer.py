"""The private half of a signing key: a file of this machine, readable for its owner alone.

It is made at first need, or given by a setting, and then only read. Rotation has three steps, each safe to repeat after
a kill: the next key is written beside, it is published in the ledger, it takes the file's place.

Knows: files, PKCS#8. Does not know: the ledger, what is signed. Error texts carry no paths.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from billing.errors import NoSigningKey
from billing.signing import key_id_of, to_base64
from metering.disk import fsync


class SigningKey:
    """One key, in memory."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.id = key_id_of(public)
        self.public_key = to_base64(public)

    def sign(self, statement: bytes) -> str:
        """The signature, base64url without padding; the same for the same bytes."""
        return to_base64(self._private.sign(statement))

    def pem(self) -> bytes:
        return self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class Signer:
    """The keys of one data folder. `given`: the file is somebody else's to write, and is only read here.

    Every method raises `NoSigningKey` where the file cannot be used.
    """

    def __init__(self, path: Path, holder: str, *, given: bool = False) -> None:
        self.holder = holder
        self.given = given
        self._path = path
        self._beside = path.with_name(path.name + ".next")

    def key(self) -> SigningKey:
        """The key that signs now; it is read anew each time, as another process may have changed it."""
        try:
            if not self.given and not self._path.exists():
                return self._make(self._path)
            return _read(self._path)
        except OSError as error:
            raise NoSigningKey(f"the signing key cannot be read or made: {error.strerror}") from None

    def following(self) -> SigningKey:
        """The key that is to take its place: written down, and the same again until it has."""
        if self.given:
            raise NoSigningKey("the signing key is given by the setting signing_key_file: put another into that file")
        try:
            return _read(self._beside) if self._beside.exists() else self._make(self._beside)
        except OSError as error:
            raise NoSigningKey(f"the next signing key cannot be read or made: {error.strerror}") from None

    def promote(self, key_id: str) -> None:
        """Let the following key take the place, if it has this id; once it has, again does nothing."""
        try:
            if self._beside.exists() and _read(self._beside).id == key_id:
                self._beside.replace(self._path)
                fsync(self._path.parent)
        except OSError as error:
            raise NoSigningKey(f"the next signing key cannot be put in place: {error.strerror}") from None

    def _make(self, path: Path) -> SigningKey:
        """Write beside, then link: of two processes that make one at once both end up with the one that stands."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = SigningKey(Ed25519PrivateKey.generate())
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(made.pem())
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        except FileExistsError:
            made = _read(path)
        finally:
            draft.unlink()
        fsync(path.parent)
        return made


def _read(path: Path) -> SigningKey:
    try:
        private = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise NoSigningKey("the signing key's file does not hold an Ed25519 key in PEM without a password")
    return SigningKey(private)
