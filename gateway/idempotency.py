"""`Idempotency-Key` on `/v1`: generated once, billed once, and every retry gets the same answer.

Knows: which keys have work running (a retry joins it), and the finished answers, kept in SQLite for a day and within
a number of bytes. Does not know what an answer says. A key belongs to the API key that sent it. Only finished answers
are kept: a refusal, and a generation that was cut short, leave the key free, so that a retry tries anew.

The answer is stored before its request is settled. A crash between the two leaves an answer whose tokens are settled
from the journal at the next start: still generated once and billed once. After a crash before it was stored, the work
done is settled as `interrupted` and a retry generates anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from gateway.errors import Conflict, api_error, invalid
from gateway.sse import Answer

log = structlog.get_logger(__name__)

HEADER = "idempotency-key"
MAX_KEY_LENGTH = 255
REPLAYED = "idempotent-replayed"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    scope BLOB PRIMARY KEY,      -- sha256 of API key id and Idempotency-Key
    digest BLOB NOT NULL,        -- sha256 of path and body
    stream INTEGER NOT NULL,
    body BLOB NOT NULL,
    created_us INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_by_size ON answers (created_us, length(body));
"""


class Store:
    """The finished answers on disk. Synchronous and thread-safe; times in microseconds."""

    def __init__(self, path: Path, *, max_bytes: int, ttl_s: int) -> None:
        self._max_bytes = max_bytes
        self._ttl_us = ttl_s * 1_000_000
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)

    def get(self, scope: bytes, now_us: int) -> tuple[bytes, bool, bytes] | None:
        """(digest, stream, body) of a finished answer; None when there is none or it is too old."""
        with self._lock:
            row = self._db.execute(
                "SELECT digest, stream, body FROM answers WHERE scope = ? AND created_us > ?",
                (scope, now_us - self._ttl_us),
            ).fetchone()
        return row and (row[0], bool(row[1]), row[2])

    def put(self, scope: bytes, digest: bytes, stream: bool, body: bytes, now_us: int) -> None:
        """Keep an answer, durably; what is too old, or over the size with the oldest first, goes."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", (scope, digest, stream, body, now_us)
                )
                self._db.execute("DELETE FROM answers WHERE created_us <= ?", (now_us - self._ttl_us,))
                self._shrink()
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise

    def _shrink(self) -> None:
        (total,) = self._db.execute("SELECT COALESCE(SUM(length(body)), 0) FROM answers").fetchone()
        if total <= self._max_bytes:
            return
        oldest = self._db.execute("SELECT scope, length(body) FROM answers ORDER BY created_us").fetchall()
        for scope, size in oldest:
            if total <= self._max_bytes * 9 // 10:  # some air, so that not every answer has to shrink
                return
            self._db.execute("DELETE FROM answers WHERE scope = ?", (scope,))
            total -= size

    def close(self) -> None:
        with self._lock:
            self._db.close()


class Claim:
    """The right to produce the answer for a key. `release` ends it, however it went."""

    def __init__(self, owner: Idempotency, scope: bytes, digest: bytes, answer: Answer) -> None:
        self._owner = owner
        self.scope = scope
        self.digest = digest
        self.answer = answer

    async def keep(self, body: bytes) -> None:
        """Store the finished answer, durably. A failure is logged: the answer still goes to who waits for it."""
        await self._owner.keep(self, body)

    def release(self) -> None:
        """From now on a request with this key looks in the store."""
        self._owner.running.pop(self.scope, None)


class Idempotency:
    """Who works on which key. Lives on the event loop."""

    def __init__(self, store: Store, clock_us: Callable[[], int]) -> None:
        self._store = store
        self._clock_us = clock_us
        self.running: dict[bytes, Claim] = {}

    async def claim(
        self, *, key_id: str, key: str, path: str, body: bytes, stream: bool
    ) -> tuple[Claim, None] | tuple[None, Answer]:
        """Either the right to answer, or the answer of an earlier attempt, finished or still growing.

        Raises `BadRequest` for a key that cannot be one, `Conflict` when it was used for another body.
        """
        if not 0 < len(key) <= MAX_KEY_LENGTH or not key.isprintable():
            raise invalid(HEADER, f"must be 1 to {MAX_KEY_LENGTH} printable characters")
        scope = hashlib.sha256(f"{key_id}\0{key}".encode()).digest()
        digest = hashlib.sha256(path.encode() + b"\0" + body).digest()
        first = self.running.get(scope)
        if first is not None:
            _check_same(first.digest, digest)
            return None, first.answer
        claim = Claim(self, scope, digest, Answer(stream=stream, keep=True))
        self.running[scope] = claim  # before the first pause: a second attempt finds it
        try:
            stored = await asyncio.to_thread(self._store.get, scope, self._clock_us())
            if stored is None:
                return claim, None
            _check_same(stored[0], digest)
        except BaseException as error:
            claim.answer.fail(api_error(error))  # for attempts that joined in the meantime
            claim.release()
            raise
        claim.answer.end([stored[2]])
        claim.release()
        return None, claim.answer

    async def keep(self, claim: Claim, body: bytes) -> None:
        try:
            await asyncio.to_thread(
                self._store.put, claim.scope, claim.digest, claim.answer.stream, body, self._clock_us()
            )
        except sqlite3.Error as error:
            log.error("idempotent_answer_not_kept", error=str(error))


def _check_same(known: bytes, digest: bytes) -> None:
    if known != digest:
        raise Conflict(
            "This Idempotency-Key was used for a request with other content.",
            param=HEADER,
            code="idempotency_conflict",
        )
