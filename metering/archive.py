"""Months of usage events as Parquet files, kept when the usage store drops them.

    FOLDER/2026-09/manifest.json     what the files are: rows, bytes, SHA-256, the digest of their events
    FOLDER/2026-09/part-0001.parquet one row an event, by time and id; its canonical bytes in `body`

A part never changes: what turns up later is another part. A file counts only when the manifest names it, and the
manifest takes its place in one rename, after everything in it was written, fsynced, read back and compared. Every
event is checked against its hash whenever it is read.

Knows: files and their checks. Does not know: the usage store, when something is archived or dropped (`retention`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metering.disk import fsync
from metering.errors import StoreDamaged, StoreNewer
from metering.events import UsageEvent, VersionError, content_hash, decode, encode

FORMAT = 1
ROWS_A_GROUP = 20_000
_MANIFEST = "manifest.json"
_UNFINISHED = ".new"
_MODULUS = 1 << 256

_SCHEMA = pa.schema(
    [
        ("ts_us", pa.int64()),
        ("event_id", pa.string()),
        ("settled_us", pa.int64()),
        ("tenant", pa.string()),
        ("model", pa.string()),
        ("content_hash", pa.string()),
        ("standing", pa.bool_()),  # False: a second content under its id, kept and counted nowhere
        ("body", pa.binary()),
    ]
)


class ArchivedEvent(msgspec.Struct, frozen=True):
    """An event, and whether it stands; the store keeps second contents too."""

    event: UsageEvent
    standing: bool


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One file."""

    file: str
    rows: int
    standing: int
    nbytes: int
    sha256: str
    digest: str  # of its events, see `Digest`
    first_us: int
    last_us: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All files of one month."""

    format: int = FORMAT
    month: int  # 202609
    parts: list[Part]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def standing(self) -> int:
        return sum(part.standing for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Digest:
    """Of a set of events in any order: the sum of their content hashes as numbers, modulo 2^256, and their number.

    ClickHouse has the same in one aggregate (`metering.retention`).
    """

    def __init__(self) -> None:
        self.rows = self._sum = 0

    def add(self, digest: str) -> None:
        self.rows += 1
        self._sum = (self._sum + int(digest, 16)) % _MODULUS

    def __str__(self) -> str:
        return str(self._sum)


class Archive:
    """One folder. Any number may read; one writes at a time."""

    def __init__(self, folder: Path) -> None:
        """Makes nothing yet."""
        self.folder = folder

    def months(self) -> list[int]:
        """The months there are, ascending."""
        found = self.folder.glob(f"[0-9][0-9][0-9][0-9]-[0-9][0-9]/{_MANIFEST}")
        return sorted(int(path.parent.name.replace("-", "")) for path in found)

    def manifest(self, month: int) -> Manifest:
        """Raises `StoreDamaged` when it is missing or cannot be read, `StoreNewer` for a later format."""
        path = self._folder(month) / _MANIFEST
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            raise StoreDamaged(f"the archive of {shown(month)} is missing") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreDamaged(f"the archive's manifest of {shown(month)} cannot be read") from error
        if manifest.format > FORMAT:
            raise StoreNewer(f"the archive of {shown(month)} was written by a newer version of Meterhouse")
        return manifest

    def write(self, month: int, events: Iterable[ArchivedEvent]) -> Manifest:
        """Add a part with these events, which come by time and id; without any, nothing changes.

        When it returns, they are on the disk, have been read back and are what was given. Raises `StoreDamaged`
        when they are not, and `OSError`; then there is no new part.
        """
        before = self.manifest(month).parts if month in self.months() else []
        folder = self._folder(month)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"part-{len(before) + 1:04}.parquet"
        unfinished = path.with_name(path.name + _UNFINISHED)
        part = _written(unfinished, path.name, events)
        if part is None:
            unfinished.unlink()
            return Manifest(month=month, parts=before)
        _check(unfinished, part)
        unfinished.replace(path)
        manifest = Manifest(month=month, parts=[*before, part])
        _replace(folder / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        fsync(self.folder)
        return manifest

    def check(self, month: int) -> Manifest:
        """Read every byte and every event of a month. Raises `StoreDamaged` with what is wrong."""
        manifest = self.manifest(month)
        for part in manifest.parts:
            _check(self._folder(month) / part.file, part)
        return manifest

    def events(self, months: Iterable[int], tenant: str | None, start_us: int, end_us: int) -> Iterator[UsageEvent]:
        """The events of [start, end) that stand, by time and id.

        Raises `StoreDamaged` at a part that is missing or cut, and at an event whose bytes are not its hash's.
        """
        for month in sorted(months):
            parts = [
                self._part(month, part, tenant, start_us, end_us)
                for part in self.manifest(month).parts
                if part.first_us < end_us and start_us <= part.last_us
            ]
            yield from heapq.merge(*parts, key=lambda event: (event.ts_us, event.event_id))

    def contents(self, month: int) -> Iterator[ArchivedEvent]:
        """Everything of a month, second contents too, part after part. Raises as `events` does."""
        for part in self.manifest(month).parts:
            for batch in self._batches(month, part, part.first_us, part.last_us + 1, _SCHEMA.names):
                for body, hash, standing in zip(batch["body"], batch["content_hash"], batch["standing"], strict=True):
                    yield ArchivedEvent(_event(body, hash), standing)

    def standing_ids(self, month: int) -> Iterator[str]:
        """The ids of a month's events that stand."""
        for part in self.manifest(month).parts:
            for batch in self._batches(month, part, part.first_us, part.last_us + 1, ["event_id", "standing"]):
                rows = zip(batch["event_id"], batch["standing"], strict=True)
                yield from (id for id, standing in rows if standing)

    def known(self, month: int, times_us: dict[str, int]) -> dict[str, str]:
        """Of these ids, given with their events' times, those that the month has: id → the content that stands."""
        found: dict[str, str] = {}
        if not times_us:
            return found
        first_us, last_us = min(times_us.values()), max(times_us.values())
        for part in self.manifest(month).parts:
            columns = ["event_id", "content_hash", "standing"]
            for batch in self._batches(month, part, first_us, last_us + 1, columns):
                for id, digest, standing in zip(*(batch[name] for name in columns), strict=True):
                    if standing and id in times_us:
                        found[id] = digest
        return found

    def hashes(self, month: int, start_us: int, end_us: int) -> set[str]:
        """The content hashes of everything that began in [start, end)."""
        found: set[str] = set()
        for part in self.manifest(month).parts:
            for batch in self._batches(month, part, start_us, end_us, ["content_hash"]):
                found.update(batch["content_hash"])
        return found

    def second(self, months: Iterable[int], start_us: int, end_us: int) -> list[str]:
        """Ids of [start, end) that were stored with more than one content."""
        found: set[str] = set()
        for month in months:
            for part in self.manifest(month).parts:
                if part.standing < part.rows:
                    for batch in self._batches(month, part, start_us, end_us, ["ts_us", "event_id", "standing"]):
                        rows = zip(batch["ts_us"], batch["event_id"], batch["standing"], strict=True)
                        found.update(id for ts_us, id, standing in rows if not standing and start_us <= ts_us < end_us)
        return sorted(found)

    def scanned(self, months: Iterable[int], start_us: int, end_us: int) -> int:
        """How many rows, of all tenants, lie in the files' stretches that `events` of [start, end) has to read."""
        return sum(
            file.metadata.row_group(group).num_rows
            for month in months
            for part in self.manifest(month).parts
            if part.first_us < end_us and start_us <= part.last_us
            for file, group in self._groups(month, part, start_us, end_us)
        )

    def _part(self, month: int, part: Part, tenant: str | None, start_us: int, end_us: int) -> Iterator[UsageEvent]:
        for file, group in self._groups(month, part, start_us, end_us):
            rows = file.read_row_group(group, columns=["ts_us", "tenant", "content_hash", "standing", "body"])
            times = rows["ts_us"]
            wanted = pc.and_(pc.greater_equal(times, start_us), pc.less(times, end_us))
            wanted = pc.and_(wanted, rows["standing"])
            if tenant is not None:
                wanted = pc.and_(wanted, pc.equal(rows["tenant"], tenant))
            found = rows.select(["body", "content_hash"]).filter(wanted).to_pydict()
            yield from map(_event, found["body"], found["content_hash"])

    def _batches(
        self, month: int, part: Part, start_us: int, end_us: int, columns: list[str]
    ) -> Iterator[dict[str, list[Any]]]:
        """The row groups that may have events of [start, end), as columns."""
        for file, group in self._groups(month, part, start_us, end_us):
            yield file.read_row_group(group, columns=columns).to_pydict()

    def _groups(self, month: int, part: Part, start_us: int, end_us: int) -> Iterator[tuple[Any, int]]:
        """The row groups that may have events of [start, end): the open file, and which of it."""
        path = self._folder(month) / part.file
        with closing(_opened(path, part)) as file:
            for group in range(file.num_row_groups):
                times = file.metadata.row_group(group).column(0).statistics
                if times.min < end_us and start_us <= times.max:
                    yield file, group

    def _folder(self, month: int) -> Path:
        return self.folder / shown(month)


def month_of(time_us: int) -> int:
    """202609 for an instant in September 2026, in UTC."""
    time = datetime.fromtimestamp(time_us // 1_000_000, UTC)
    return time.year * 100 + time.month


def month_us(month: int) -> tuple[int, int]:
    """(first microsecond, end) of a month."""
    year, number = divmod(month, 100)
    following = (year + 1, 1) if number == 12 else (year, number + 1)
    first, end = datetime(year, number, 1, tzinfo=UTC), datetime(*following, 1, tzinfo=UTC)
    return int(first.timestamp()) * 1_000_000, int(end.timestamp()) * 1_000_000


def shown(month: int) -> str:
    """2026-09."""
    return f"{month // 100:04}-{month % 100:02}"


def within(months: Collection[int], start_us: int, end_us: int) -> list[int]:
    """Those of the months that [start, end) touches."""
    return [month for month in months if month_us(month)[0] < end_us and start_us < month_us(month)[1]]


def _written(path: Path, name: str, events: Iterable[ArchivedEvent]) -> Part | None:
    """Write a file; None when there was nothing to write into it."""
    digest, standing, times = Digest(), 0, [0, 0]
    rows: list[tuple[Any, ...]] = []
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        for archived in events:
            event = archived.event
            hash = content_hash(event)
            if not digest.rows:
                times[0] = event.ts_us
            times[1] = event.ts_us
            digest.add(hash)
            standing += archived.standing
            rows.append(
                (
                    *(event.ts_us, event.event_id, event.settled_us, event.tenant, event.model),
                    *(hash, archived.standing, encode(event)),
                )
            )
            if len(rows) == ROWS_A_GROUP:
                _write_group(writer, rows)
        _write_group(writer, rows)
    fsync(path)
    if not digest.rows:
        return None
    return Part(
        file=name,
        rows=digest.rows,
        standing=standing,
        nbytes=path.stat().st_size,
        sha256=_file_hash(path),
        digest=str(digest),
        first_us=times[0],
        last_us=times[1],
    )


def _write_group(writer: Any, rows: list[tuple[Any, ...]]) -> None:
    if rows:
        columns = [
            pa.array(column, type=field.type) for column, field in zip(zip(*rows, strict=True), _SCHEMA, strict=True)
        ]
        writer.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), row_group_size=ROWS_A_GROUP)
        rows.clear()


def _opened(path: Path, part: Part) -> Any:
    try:
        if path.stat().st_size != part.nbytes:
            raise StoreDamaged(f"{part.file} of the archive does not have the length it was written with")
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise StoreDamaged(f"{part.file} of the archive is missing") from None
    except (OSError, pa.ArrowException) as error:
        raise StoreDamaged(f"{part.file} of the archive cannot be read") from error
    if file.metadata.num_rows != part.rows:
        raise StoreDamaged(f"{part.file} of the archive does not have the rows it was written with")
    return file


def _check(path: Path, part: Part) -> None:
    """Whether a file is what its part says, to the last event. Raises `StoreDamaged`."""
    with closing(_opened(path, part)) as file:
        if _file_hash(path) != part.sha256:
            raise StoreDamaged(f"{part.file} of the archive does not have the bytes it was written with")
        digest, before = Digest(), (0, "", "")
        for group in range(file.num_row_groups):
            columns = file.read_row_group(group).to_pydict()
            for body, hash, *row in zip(*(columns[name] for name in ("body", "content_hash", *_IDENTITY)), strict=True):
                event = _event(body, hash)
                place = (event.ts_us, event.event_id, hash)
                if [getattr(event, name) for name in _IDENTITY] != row or place < before:
                    raise StoreDamaged(f"{part.file} of the archive has an event in the wrong place")
                before = place
                digest.add(hash)
    if (digest.rows, str(digest)) != (part.rows, part.digest):
        raise StoreDamaged(f"{part.file} of the archive has other events than it was written with")


_IDENTITY = ("ts_us", "event_id", "settled_us", "tenant", "model")


def _event(body: bytes, hash: str) -> UsageEvent:
    if hashlib.sha256(body).hexdigest() != hash:
        raise StoreDamaged("an event of the archive is not what was archived")
    try:
        return decode(body)
    except VersionError as error:
        raise StoreNewer(f"an event of the archive: {error}") from None
    except msgspec.MsgspecError:
        raise StoreDamaged("an event of the archive is not what was archived") from None


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_name(path.name + _UNFINISHED)
    unfinished.write_bytes(data)
    fsync(unfinished)
    unfinished.replace(path)
    fsync(path.parent)
