"""What a killed gateway's journal still has open, read beside the product."""

from __future__ import annotations

from pathlib import Path

from metering.segments import Orphan, read_folder
from metering.totals import Totals


def orphans_of(folder: Path) -> list[Orphan]:
    """The requests that the folder's journal opened and never settled. Changes nothing."""
    if not (folder / "totals.sqlite3").exists():
        return read_folder(folder, 0).state.orphans()
    totals = Totals(folder)
    try:
        return read_folder(folder, totals.through()).state.orphans()
    finally:
        totals.close()
