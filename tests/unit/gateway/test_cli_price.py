"""`meterhouse price simulate`: what of its flags and files becomes the call, and how the answer is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.commands import base

ROW = {"tenant": "acme", "model": None, "requests": 3, "charged": "1.00", "currency": "usd"}
ANSWER = {
    "data": [{**ROW, "would_be": None, "difference": None, "percent": None}],
    "missing": [{"tenant": "acme", "model": "pirate", "endpoint": "e", "reason": "no price in usd", "requests": 2}],
    "uncharged": {"acme": 1},
}
RANGE = ("--start=2026-11-01", "--end=2026-12-01")


class Api:
    """Remembers what was asked."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Any]] = []

    def post(self, path: str, *, body: Any) -> Any:
        self.asked.append((path, body))
        return self.answer


@contextmanager
def connected(api: Api) -> Iterator[Api]:
    yield api


def run(api: Api, *arguments: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "connect", lambda *_: connected(api))
        return CliRunner().invoke(main, ["price", "simulate", *RANGE, *arguments])


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_book_and_standing_versions_become_one_call(tmp_path: Path, suffix: str) -> None:
    book = tmp_path / f"book{suffix}"
    price = {"model": "*", "currency": "usd", "per_million": {"prompt": "1"}}
    toml = 'alone = true\n[[prices]]\nmodel = "*"\ncurrency = "usd"\nper_million = {prompt = "1"}\n'
    book.write_text(toml if suffix == ".toml" else json.dumps({"alone": True, "prices": [price]}))
    api = Api({"data": [], "missing": [], "uncharged": {}})
    done = run(api, f"--book={book}", "--as-if=p1", "--as-if=p2", "--effective-at=7", "--tenant=acme", "--by=model")
    assert done.exit_code == 0, done.output
    assert api.asked == [
        (
            "/prices/simulation",
            {
                "start": "2026-11-01",
                "end": "2026-12-01",
                "tenant": "acme",
                "by_model": True,
                "alone": True,
                "prices": [price, {"price": "p1", "effective_at": "7"}, {"price": "p2", "effective_at": "7"}],
            },
        )
    ]


def test_what_has_no_price_is_told_and_is_the_exit_code() -> None:
    shown = run(Api(ANSWER), "--as-if=p1")
    assert shown.exit_code == 1
    for told in ("acme", "1.00", "pirate", "no price in usd", "acme: 1 requests have no charge yet"):
        assert told in shown.output
    plain = run(Api(ANSWER), "--as-if=p1", "--json")
    assert plain.exit_code == 1


@pytest.mark.parametrize(
    ("text", "flags", "told"),
    [
        ("prices = [", (), "cannot be read"),
        ("price = []", (), "'price'"),
        ("prices = 5", (), "a list of prices"),
        ("prices = []", (), "nothing to simulate"),
        (None, (), "nothing to simulate"),
        ("prices = []", ("--effective-at=5",), "--as-if"),
    ],
)
def test_a_bad_book_is_wrong_use(tmp_path: Path, text: str | None, flags: tuple[str, ...], told: str) -> None:
    book = tmp_path / "book.toml"
    if text is not None:
        book.write_text(text)
        flags = (f"--book={book}", *flags)
    done = run(Api(ANSWER), *flags)
    assert done.exit_code == click.UsageError.exit_code
    assert told in done.output
