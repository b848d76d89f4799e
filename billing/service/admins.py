"""Admin keys: the commands, the look-up, and the notes of what was refused and of what was begun elsewhere."""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from billing.admins import ActBegun, AdminKey, AdminKeyCreated, AdminKeyRevoked, CommandRefused, check_admin_key
from billing.books import new_event
from billing.service.shell import Idempotency, Shell, page
from billing.store import NewEvent

PREFIX = "mh-admin-"
SECRET_BYTES = 32
SHOWN = len(PREFIX) + 4
STREAM = "admins"


class AdminService(Shell):
    """Who may administer."""

    def create_admin_key(
        self, name: str, role: str, *, idempotency: Idempotency | None = None
    ) -> tuple[AdminKey, str | None]:
        """The key and its secret, which is shown this once: a replay gives the key and None. Raises `Invalid`."""
        secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)

        def decide(time_us: int) -> tuple[list[NewEvent], AdminKey]:
            checked = check_admin_key(name, role)
            self._books.admins.check_room()
            key = AdminKey(id=self._new_id("admin"), name=name, role=checked, prefix=secret[:SHOWN], created_us=time_us)
            return [new_event(STREAM, AdminKeyCreated(key=key, secret_sha256=_sha256(secret)))], key

        key, fresh = self._command("create_admin_key", idempotency, AdminKey, decide)
        return key, secret if fresh else None

    def revoke_admin_key(self, key_id: str, *, idempotency: Idempotency | None = None) -> AdminKey:
        """From now on the key opens nothing; revoking it again changes nothing. Raises `NotFound`."""

        def decide(time_us: int) -> tuple[list[NewEvent], AdminKey]:
            key = self._books.admins.key(key_id)
            if key.revoked_us is not None:
                return [], key
            revoked = msgspec.structs.replace(key, revoked_us=time_us)
            return [new_event(STREAM, AdminKeyRevoked(key=revoked))], revoked

        return self._command("revoke_admin_key", idempotency, AdminKey, decide)[0]

    def admin_keys(self, limit: int = 100, after: str | None = None) -> list[AdminKey]:
        """Revoked ones too, in the order of creation."""
        with self._state:
            return page(list(self._books.admins.keys.values()), lambda key: key.id, limit, after)

    def admin_by_secret(self, secret: str) -> AdminKey | None:
        """Who holds the secret; None for an unknown or revoked one. Hashed before it is looked up: the time that takes
        tells nothing about any secret."""
        try:
            digest = _sha256(secret)
        except UnicodeEncodeError:
            return None
        with self._state:
            return self._books.admins.by_secret(digest)

    def note_refused(self, refused: CommandRefused) -> None:
        """Write down that a command was not carried out, under the actor whose it was."""
        self._command("note_refused", None, int, lambda _: ([new_event(STREAM, refused)], 0))

    def note_begun(self, begun: ActBegun, *, idempotency: Idempotency | None = None) -> None:
        """Write down an act that is no command of this ledger, under the actor whose it is. Raises
        `IdempotencyConflict`."""
        self._command("note_begun", idempotency, int, lambda _: ([new_event(STREAM, begun)], 0))


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
