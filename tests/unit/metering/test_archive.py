from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from metering import frozen
from metering.archive import Archive, ArchivedEvent, month_of, month_us, shown, within
from metering.counts import HOUR_US
from metering.errors import StoreDamaged, StoreNewer
from metering.events import UsageEvent, content_hash, decode, encode
from metering.retention import kept_from_us
from tests import oldevents
from tests.contract.test_usage_store import HOUR, make_event

MONTH = 202511
EVER_US = 1 << 61


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


def write(archive: Archive, *events: UsageEvent, second: tuple[UsageEvent, ...] = ()) -> None:
    given = [(event, True) for event in events] + [(event, False) for event in second]
    given.sort(key=lambda pair: (pair[0].ts_us, pair[0].event_id, content_hash(pair[0])))
    archive.write(MONTH, [ArchivedEvent(*pair) for pair in given])


def test_every_event_comes_back_to_the_same_bytes(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metering.archive.ROWS_A_GROUP", 3)
    events = [
        *(decode(body) for body in oldevents.EVENTS),
        *(make_event(i, user="Zoë\0", metadata={"ключ": "値"}) for i in range(10)),
    ]
    write(archive, *events)
    expected = sorted(events, key=lambda event: (event.ts_us, event.event_id))
    assert [encode(event) for event in archive.events([MONTH], None, 0, EVER_US)] == [encode(e) for e in expected]
    assert archive.check(MONTH).rows == 12
    of_one = archive.events([MONTH], "globex", HOUR, HOUR + 4_000_000)
    assert [event.event_id for event in of_one] == [make_event(1).event_id, make_event(3).event_id]
    assert archive.months() == [MONTH]


def test_parts_are_added_and_read_as_one(archive: Archive) -> None:
    write(archive, *(make_event(i) for i in range(0, 10, 2)))
    write(archive)
    write(archive, *(make_event(i) for i in range(1, 10, 2)), second=(make_event(2, completion_tokens=9),))
    manifest = archive.check(MONTH)
    assert [(part.file, part.rows, part.standing) for part in manifest.parts] == [
        ("part-0001.parquet", 5, 5),
        ("part-0002.parquet", 6, 5),
    ]
    assert list(archive.events([MONTH], None, 0, EVER_US)) == [make_event(i) for i in range(10)]
    assert archive.second([MONTH], 0, EVER_US) == [make_event(2).event_id]
    assert archive.second([MONTH], 0, HOUR) == []
    wanted = {make_event(i).event_id: make_event(i).ts_us for i in (2, 3, 50)}
    assert archive.known(MONTH, wanted) == {make_event(i).event_id: content_hash(make_event(i)) for i in (2, 3)}
    assert archive.known(MONTH, {}) == {}
    assert len(archive.hashes(MONTH, 0, EVER_US)) == 11


def test_killed_before_the_manifest_there_is_no_part(archive: Archive) -> None:
    write(archive, make_event(0))
    folder = archive.folder / "2025-11"
    for left in ("part-0002.parquet", "part-0003.parquet.new", "manifest.json.new"):
        (folder / left).write_bytes(b"half")
    assert list(archive.events([MONTH], None, 0, EVER_US)) == [make_event(0)]
    write(archive, make_event(1))
    assert [part.file for part in archive.check(MONTH).parts] == ["part-0001.parquet", "part-0002.parquet"]
    assert list(archive.events([MONTH], None, 0, EVER_US)) == [make_event(0), make_event(1)]


def test_every_damage_is_found(archive: Archive) -> None:
    write(archive, *(make_event(i) for i in range(50)))
    path = archive.folder / "2025-11" / "part-0001.parquet"
    sound = path.read_bytes()
    for damaged in (sound[:-1], sound + b"\0", b""):
        path.write_bytes(damaged)
        with pytest.raises(StoreDamaged, match="length"):
            list(archive.events([MONTH], None, 0, EVER_US))
    for at in range(4, len(sound), len(sound) // 60):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises(StoreDamaged):
            archive.check(MONTH)
    path.unlink()
    with pytest.raises(StoreDamaged, match="missing"):
        archive.check(MONTH)
    path.write_bytes(sound)
    assert archive.check(MONTH).rows == 50
    manifest = path.with_name("manifest.json")
    text = manifest.read_text()
    manifest.write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(StoreNewer):
        archive.manifest(MONTH)
    manifest.write_text(text[:50])
    with pytest.raises(StoreDamaged, match="manifest"):
        archive.manifest(MONTH)
    with pytest.raises(StoreDamaged, match="2025-12 is missing"):
        archive.manifest(202512)


def test_what_was_written_is_compared_before_it_counts(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    write(archive, make_event(0))
    monkeypatch.setattr("metering.archive.encode", lambda event: encode(make_event(7)))
    with pytest.raises(StoreDamaged, match="not what was archived"):
        write(archive, make_event(1))
    monkeypatch.undo()
    assert archive.check(MONTH).rows == 1
    with pytest.raises(StoreDamaged, match="wrong place"):
        archive.write(MONTH, [ArchivedEvent(make_event(3), True), ArchivedEvent(make_event(2), True)])
    assert archive.check(MONTH).rows == 1


def test_months() -> None:
    start, end = month_us(202512)
    assert (month_of(start), month_of(end - 1), month_of(end), month_us(202601)[0]) == (202512, 202512, 202601, end)
    assert shown(202512) == "2025-12"
    assert within([202511, 202512, 202601], start, end) == [202512]
    assert within([202511, 202512, 202601], start - 1, end + 1) == [202511, 202512, 202601]
    assert kept_from_us(start, 1) == month_us(202511)[0]
    assert kept_from_us(end - 1, 13) == month_us(202411)[0]
    assert kept_from_us(end, 1) == start
    assert kept_from_us(end, 1_000_000) == 0


def test_edges_are_what_is_no_whole_hour() -> None:
    assert frozen.edges(0, HOUR_US) == []
    assert frozen.edges(1, HOUR_US) == [(1, HOUR_US)]
    assert frozen.edges(1, HOUR_US - 1) == [(1, HOUR_US - 1)]
    assert frozen.edges(5, 2 * HOUR_US + 7) == [(5, HOUR_US), (2 * HOUR_US, 2 * HOUR_US + 7)]
    assert frozen.edges(HOUR_US, 2 * HOUR_US + 7) == [(2 * HOUR_US, 2 * HOUR_US + 7)]


def test_rows_are_added_up() -> None:
    events = [make_event(0), make_event(1), make_event(2), make_event(4, model="x")]
    rows = frozen.usage_of(events, "day", ["model"], {"tenant": ["acme"]})
    assert [(row.group["model"], row.requests, row.completion_tokens) for row in rows] == [("base", 2, 2), ("x", 1, 4)]
    assert frozen.added([*rows, *rows], ["model"]) == [
        msgspec.structs.replace(row, **{n: 2 * getattr(row, n) for n in row.__struct_fields__[2:]}) for row in rows
    ]
    assert frozen.usage_of([make_event(0)], "month", [], {"tenant": ["globex"]}) == []
