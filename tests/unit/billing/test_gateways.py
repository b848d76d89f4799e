"""The table of gateways: a row belongs to a data folder, and goes only when nothing can be missing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from billing.errors import Conflict, LedgerUnavailable, NotFound
from billing.gateways import ALIVE_US, GatewayRow, Gateways, GatewayTaken
from billing.store import EventStore

NOW_US = 1_795_000_000_000_000


@pytest.fixture
def gateways(ledger_url: str) -> Iterator[Gateways]:
    store = EventStore(ledger_url)
    yield Gateways(store)
    store.close()


def test_a_gateway_registers_moves_on_and_leaves(gateways: Gateways) -> None:
    gateways.claim("gw1", "folder-1", 100, NOW_US)
    gateways.claim("gw0", "folder-0", 50, NOW_US + 1)
    gateways.publish("gw1", "folder-1", 200, NOW_US + 2)
    assert gateways.all() == [
        GatewayRow("gw0", "folder-0", 50, NOW_US + 1, NOW_US + 1),
        GatewayRow("gw1", "folder-1", 200, NOW_US + 2, NOW_US),
    ]
    gateways.leave("folder-1")
    gateways.leave("folder-1")
    assert [row.id for row in gateways.all()] == ["gw0"]


@pytest.mark.parametrize("later_us", [0, 10 * ALIVE_US])
def test_an_id_of_another_folder_is_refused_whether_that_one_lives_or_not(gateways: Gateways, later_us: int) -> None:
    gateways.claim("gw0", "folder-0", 100, NOW_US)
    before = gateways.all()
    for attempt in (gateways.claim, gateways.publish):
        with pytest.raises(GatewayTaken) as caught:
            attempt("gw0", "folder-1", 5, NOW_US + later_us)
        assert caught.value.row == before[0]
    assert gateways.all() == before


def test_the_same_folder_takes_its_row_over_at_once_and_under_another_id_too(gateways: Gateways) -> None:
    gateways.claim("gw0", "folder-0", 100, NOW_US)
    gateways.claim("gw0", "folder-0", 90, NOW_US + 1)
    assert gateways.all() == [GatewayRow("gw0", "folder-0", 90, NOW_US + 1, NOW_US + 1)]
    gateways.claim("west", "folder-0", 95, NOW_US + 2)
    assert gateways.all() == [GatewayRow("west", "folder-0", 95, NOW_US + 2, NOW_US + 2)]
    gateways.claim("gw0", "folder-1", 7, NOW_US + 3)  # the id is free again


def test_a_dead_gateway_is_removed_by_hand_and_a_living_one_is_not(gateways: Gateways) -> None:
    gateways.claim("gw0", "folder-0", 100, NOW_US)
    for now_us in (NOW_US, NOW_US + ALIVE_US - 1, NOW_US - ALIVE_US):
        with pytest.raises(Conflict, match="moment ago"):
            gateways.remove("gw0", now_us)
    gateways.remove("gw0", NOW_US + ALIVE_US)
    assert gateways.all() == []
    with pytest.raises(NotFound):
        gateways.remove("gw0", NOW_US)


def test_a_gateway_that_was_removed_while_it_hung_is_there_again_with_its_next_word(gateways: Gateways) -> None:
    gateways.claim("gw0", "folder-0", 100, NOW_US)
    gateways.remove("gw0", NOW_US + ALIVE_US)
    gateways.publish("gw0", "folder-0", 150, NOW_US + 2 * ALIVE_US)
    assert [(row.id, row.watermark_us) for row in gateways.all()] == [("gw0", 150)]


def test_of_many_folders_that_want_one_id_at_once_one_gets_it(gateways: Gateways) -> None:
    refused: list[str] = []

    def claim(folder: str) -> None:
        try:
            gateways.claim("gw0", folder, 1, NOW_US)
        except GatewayTaken:
            refused.append(folder)

    threads = [threading.Thread(target=claim, args=(f"folder-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (row,) = gateways.all()
    assert sorted([row.folder, *refused]) == [f"folder-{n}" for n in range(4)]


def test_a_ledger_without_the_table_says_what_to_do(gateways: Gateways) -> None:
    with gateways._store.connected(write=True) as connection:
        connection.exec_driver_sql("DROP TABLE gateways")
    with pytest.raises(LedgerUnavailable, match="meterhouse migrate"):
        gateways.all()
