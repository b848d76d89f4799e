"""What the double remembers, and the few things every resource does with it: mint ids, find, page, note events."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tests.doubles.stripe.clock import Clock
from tests.doubles.stripe.errors import StripeFault, invalid, missing
from tests.doubles.stripe.forms import Schema

Object = dict[str, Any]
Params = dict[str, Any]

API_VERSION = "2026-10-28.endive"
SEARCH_LAG_S = 60  # Stripe: data is searchable "in less than 1 minute"; never right after the write


class State:
    """One account. Objects are the JSON that is answered; `kept` holds what Stripe would not show."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.objects: dict[str, dict[str, Object]] = {}  # kind → id → object, in order of creation
        self.events: list[Object] = []
        self.touched: dict[str, int] = {}  # id → second of the last write, for the search lag
        self.tax_percent: int | None = None  # what Stripe Tax finds; None: it does not know where customers are
        self._minted = 0

    def mint(self, prefix: str) -> str:
        self._minted += 1
        return f"{prefix}_double{self._minted:012x}"

    def all(self, kind: str) -> list[Object]:
        return list(self.objects.get(kind, {}).values())

    def add(self, kind: str, thing: Object, *, event: str | None = None) -> Object:
        self.objects.setdefault(kind, {})[thing["id"]] = thing
        self.touch(thing, event)
        return thing

    def touch(self, thing: Object, event: str | None = None) -> None:
        """After every change: the search index sees it later, and an event tells of it."""
        self.touched[thing["id"]] = self.clock.now()
        if event:
            self.events.append(
                {
                    "id": self.mint("evt"),
                    "object": "event",
                    "api_version": API_VERSION,
                    "created": self.clock.now(),
                    "data": {"object": json.loads(json.dumps(thing))},
                    "livemode": False,
                    "pending_webhooks": 1,
                    "request": {"id": None, "idempotency_key": None},
                    "type": event,
                }
            )

    def get(self, kind: str, ident: str, param: str = "id", *, status: int = 404) -> Object:
        """The object, or Stripe's `resource_missing`. In a body it is a 400, in a path a 404."""
        try:
            return self.objects[kind][ident]
        except KeyError:
            raise missing(kind.replace("_", " "), ident, param, status=status) from None

    def remove(self, kind: str, thing: Object, *, event: str | None = None) -> Object:
        del self.objects[kind][thing["id"]]
        self.touch(thing, event)
        return {"id": thing["id"], "object": thing["object"], "deleted": True}

    def searchable(self, kind: str) -> list[Object]:
        now = self.clock.now()
        return [thing for thing in self.all(kind) if now - self.touched[thing["id"]] >= SEARCH_LAG_S]


class Route(NamedTuple):
    """One endpoint: `path` is a pattern whose groups are handed to `handle` after the parameters."""

    method: str
    path: str
    handle: Callable[..., Object]
    schema: Schema = {}

    def match(self, method: str, path: str) -> tuple[str, ...] | None:
        found = re.fullmatch(self.path, path) if method == self.method else None
        return found.groups() if found else None


def page(things: Iterable[Object], params: Params, url: str) -> Object:
    """A list object, newest first, by cursor (https://docs.stripe.com/api/pagination)."""
    newest = list(reversed(list(things)))
    limit = params.get("limit", 10)
    ids = [thing["id"] for thing in newest]
    if "starting_after" in params and "ending_before" in params:
        raise invalid("You may not specify both cursors", code="parameter_invalid_string", param="ending_before")
    if cursor := params.get("starting_after"):
        begin = _position(ids, cursor, "starting_after") + 1
        part, more = newest[begin : begin + limit], begin + limit < len(newest)
    elif cursor := params.get("ending_before"):
        end = _position(ids, cursor, "ending_before")
        part, more = newest[max(0, end - limit) : end], end - limit > 0
    else:
        part, more = newest[:limit], limit < len(newest)
    return {"object": "list", "data": part, "has_more": more, "url": url}


def _position(ids: list[str], cursor: str, param: str) -> int:
    if cursor not in ids:
        raise StripeFault(400, f"No such object: '{cursor}'", code="resource_missing", param=param, executed=True)
    return ids.index(cursor)


def created_within(thing: Object, params: Params) -> bool:
    second, bounds = int(thing["created"]), params.get("created", {})
    return (
        second > int(bounds.get("gt", -1))
        and second >= int(bounds.get("gte", 0))
        and second < int(bounds.get("lt", second + 1))
        and second <= int(bounds.get("lte", second))
    )


def search(things: list[Object], params: Params, url: str) -> Object:
    """The part of Stripe's search language we use: `metadata['key']:'value'`, joined by AND."""
    clauses = re.split(r"\s+AND\s+", params["query"])
    wanted = {}
    for clause in clauses:
        found = re.fullmatch(r"""metadata\[['"](.+?)['"]\]:['"](.*)['"]""", clause.strip())
        if found is None:
            raise invalid(f"Invalid query: {clause}", code="parameter_invalid_string", param="query")
        wanted[found[1]] = found[2].replace("\\'", "'").replace('\\"', '"')
    hits = [thing for thing in things if all(thing["metadata"].get(key) == value for key, value in wanted.items())]
    limit, start = params.get("limit", 10), int(params.get("page", "0"))
    more = start + limit < len(hits)
    return {
        "object": "search_result",
        "data": list(reversed(hits))[start : start + limit],
        "has_more": more,
        "next_page": str(start + limit) if more else None,
        "url": url,
    }


def merge_metadata(thing: Object, changes: dict[str, str]) -> None:
    """An empty value unsets its key; no keys at all clear the map."""
    merged = {**thing["metadata"], **changes} if changes else {}
    thing["metadata"] = {key: value for key, value in merged.items() if value != ""}
