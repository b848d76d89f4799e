"""Who may administer: named admin keys with a role each; and what is written down of their acts.

Pure: facts are folded in, look-ups come out. A key's secret is nowhere kept, only its SHA-256; the bootstrap key of the
server's own file or setting is no fact and always an owner.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from billing.checks import Faults
from billing.errors import Conflict, NotFound

ADMIN_KEYS_MAX = 1000


class Role(StrEnum):
    """owner: everything. billing: reads everything, and changes what has to do with money. read_only: reads."""

    OWNER = "owner"
    BILLING = "billing"
    READ_ONLY = "read_only"


class AdminKey(msgspec.Struct, frozen=True, kw_only=True):
    """A named key of the admin API."""

    id: str
    name: str
    role: Role
    prefix: str  # the first characters of the secret, for people to know it by
    created_us: int
    revoked_us: int | None = None

    @property
    def actor(self) -> str:
        """Who did it, as the log has it."""
        return f"admin:{self.id}"


class AdminKeyCreated(msgspec.Struct, frozen=True, kw_only=True, tag="admin_key.created"):
    key: AdminKey
    secret_sha256: str


class AdminKeyRevoked(msgspec.Struct, frozen=True, kw_only=True, tag="admin_key.revoked"):
    key: AdminKey  # as it is afterwards


class CommandRefused(msgspec.Struct, frozen=True, kw_only=True, tag="admin.refused"):
    """Somebody with an admin key wanted to change something, and it was not done."""

    method: str
    path: str
    status: int
    code: str
    reason: str


class ActBegun(msgspec.Struct, frozen=True, kw_only=True, tag="admin.began"):
    """Somebody with an admin key began what is no fact of this ledger; if it was refused, that is written behind."""

    act: str  # such as gateway.remove
    target: str  # the id of what it is done to; empty where there is none


AdminFact = AdminKeyCreated | AdminKeyRevoked | CommandRefused | ActBegun


def check_admin_key(name: str, role: str) -> Role:
    """Raise `Invalid` with every fault."""
    faults = Faults()
    faults.text("name", name, 64)
    if role not in list(Role):
        faults.add("role", f"must be one of {', '.join(Role)}")
    faults.raise_if_any()
    return Role(role)


class Admins:
    """All admin keys, in the order of creation."""

    def __init__(self) -> None:
        self.keys: dict[str, AdminKey] = {}
        self._of_secret: dict[str, str] = {}

    def apply(self, fact: AdminFact) -> None:
        match fact:
            case AdminKeyCreated(key=key, secret_sha256=digest):
                self.keys[key.id] = key
                self._of_secret[digest] = key.id
            case AdminKeyRevoked(key=key):
                self.keys[key.id] = key
            case CommandRefused() | ActBegun():
                pass

    def key(self, key_id: str) -> AdminKey:
        try:
            return self.keys[key_id]
        except KeyError:
            raise NotFound("admin key", key_id) from None

    def by_secret(self, secret_sha256: str) -> AdminKey | None:
        """None for an unknown or revoked one."""
        key = self.keys.get(self._of_secret.get(secret_sha256, ""))
        return key if key is not None and key.revoked_us is None else None

    def check_room(self) -> None:
        """Raise `Conflict` where there are too many keys that open something."""
        if sum(key.revoked_us is None for key in self.keys.values()) >= ADMIN_KEYS_MAX:
            raise Conflict(f"there are at most {ADMIN_KEYS_MAX} admin keys")
