"""What the two organization endpoints are asked for: the range, its buckets, groups, filters, and the page's cursor.

Knows: OpenAI's parameters and their limits (https://platform.openai.com/docs/api-reference/usage), arrays written as
`models=a&models=b` or, as the SDK does, `models[]=a&models[]=b`. Does not know: where usage is kept. What is not
understood is refused by name, and what we do not have is answered: no request is a batch job, nobody has a service
tier. Buckets lie between multiples of their width in UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from gateway.errors import invalid

SECOND_US = 1_000_000
LAST_S = 4_294_967_296  # the usage store's times end there, in 2106
MOST_VALUES = 100  # of one filter
MAX_VALUE_LENGTH = 512

_CURSOR = re.compile(r"page_(\d{1,10})_(\d{1,10})", re.ASCII)


class Width(NamedTuple):
    """A bucket's width, how many buckets a page has, and may have."""

    seconds: int
    limit: int
    most: int


USAGE_WIDTHS = {"1d": Width(86_400, 7, 31), "1h": Width(3_600, 24, 168), "1m": Width(60, 60, 1_440)}
COST_WIDTHS = {"1d": Width(86_400, 7, 180)}

USAGE_GROUPS = ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source")
COST_GROUPS = ("project_id", "line_item", "api_key_id", "api_source")
USAGE_FILTERS = ("project_ids", "user_ids", "api_key_ids", "models")
COST_FILTERS = ("project_ids", "api_key_ids", "line_items")


class Shape(msgspec.Struct, frozen=True):
    """What one of the endpoints takes."""

    widths: Mapping[str, Width]
    groups: tuple[str, ...]
    filters: tuple[str, ...]
    batch: bool  # whether it can be filtered by
    whole: bool  # whether the range is widened to whole buckets; else the first and last bucket are cut to it


USAGE = Shape(USAGE_WIDTHS, USAGE_GROUPS, USAGE_FILTERS, batch=True, whole=False)
COSTS = Shape(COST_WIDTHS, COST_GROUPS, COST_FILTERS, batch=False, whole=True)


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a report. Times are seconds since the epoch, the end excluded."""

    start_s: int  # of this page
    end_s: int  # of the whole range
    width_s: int
    limit: int
    group_by: tuple[str, ...]
    filters: dict[str, list[str]]
    batch: bool | None

    def buckets(self) -> list[tuple[int, int]]:
        """(first second, end) of each bucket of this page."""
        found: list[tuple[int, int]] = []
        start_s = self.start_s
        while start_s < self.end_s and len(found) < self.limit:
            end_s = min(start_s - start_s % self.width_s + self.width_s, self.end_s)
            found.append((start_s, end_s))
            start_s = end_s
        return found

    def next_page(self) -> str | None:
        """The cursor of the page behind this one. All pages of a report have the end of the first."""
        buckets = self.buckets()
        if not buckets or buckets[-1][1] >= self.end_s:
            return None
        return f"page_{buckets[-1][1]}_{self.end_s}"


def parse_query(given: list[tuple[str, str]], shape: Shape, now_s: int) -> UsageQuery:
    """Raises `BadRequest` for the first fault, which it names."""
    values: dict[str, list[str]] = {}
    for name, value in given:
        values.setdefault(name.removesuffix("[]"), []).append(value)
    known = {"start_time", "end_time", "bucket_width", "limit", "page", "group_by", *shape.filters}
    if strange := sorted(set(values) - known - ({"batch"} if shape.batch else set())):
        raise invalid(strange[0][:100], "is not a parameter of this request", code="unknown_parameter")
    width = _width(_one(values, "bucket_width") or "1d", shape)
    start_s = _time(values, "start_time")
    if start_s is None:
        raise invalid("start_time", "is required", code="missing_required_parameter")
    end_s = _time(values, "end_time")
    end_s = now_s + 1 if end_s is None else end_s
    if shape.whole:
        start_s -= start_s % width.seconds
        end_s += -end_s % width.seconds
    page = _one(values, "page")
    if page is not None:
        start_s, end_s = _cursor(page, start_s, width)
    if end_s <= start_s:
        raise invalid("end_time", "must be later than start_time")
    return UsageQuery(
        start_s=start_s,
        end_s=end_s,
        width_s=width.seconds,
        limit=_limit(values, width),
        group_by=_groups(values, shape),
        filters={name: _list(values, name) for name in shape.filters if name in values},
        batch=_batch(values),
    )


def _one(values: Mapping[str, list[str]], name: str) -> str | None:
    found = values.get(name, [])
    if len(found) > 1:
        raise invalid(name, "is given more than once")
    return found[0] if found else None


def _whole(text: str, name: str, most: int) -> int:
    if not re.fullmatch(r"\d{1,12}", text, re.ASCII) or int(text) > most:
        raise invalid(name, f"must be a whole number of at most {most}")
    return int(text)


def _time(values: Mapping[str, list[str]], name: str) -> int | None:
    text = _one(values, name)
    return None if text is None else _whole(text, name, LAST_S)


def _width(text: str, shape: Shape) -> Width:
    if text not in shape.widths:
        raise invalid("bucket_width", f"must be one of {', '.join(shape.widths)}")
    return shape.widths[text]


def _limit(values: Mapping[str, list[str]], width: Width) -> int:
    text = _one(values, "limit")
    limit = width.limit if text is None else _whole(text, "limit", width.most)
    if limit < 1:
        raise invalid("limit", f"must lie between 1 and {width.most}")
    return limit


def _cursor(page: str, start_s: int, width: Width) -> tuple[int, int]:
    parts = _CURSOR.fullmatch(page)
    if parts is None or int(parts[1]) < start_s or int(parts[1]) % width.seconds or int(parts[2]) > LAST_S:
        raise invalid("page", "is not the `next_page` of an answer to this request")
    return int(parts[1]), int(parts[2])


def _list(values: Mapping[str, list[str]], name: str) -> list[str]:
    found = values.get(name, [])
    if len(found) > MOST_VALUES or any(not 0 < len(value) <= MAX_VALUE_LENGTH for value in found):
        raise invalid(name, f"must be at most {MOST_VALUES} texts of 1 to {MAX_VALUE_LENGTH} characters")
    return list(dict.fromkeys(found))


def _groups(values: Mapping[str, list[str]], shape: Shape) -> tuple[str, ...]:
    names = list(_split(values.get("group_by", [])))
    if strange := [name for name in names if name not in shape.groups]:
        raise invalid("group_by", f"{strange[0][:100]!r} is unknown; known are {', '.join(shape.groups)}")
    return tuple(dict.fromkeys(names))


def _split(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield from (part.strip() for part in text.split(",") if part.strip())


def _batch(values: Mapping[str, list[str]]) -> bool | None:
    text = _one(values, "batch")
    if text not in (None, "true", "false"):
        raise invalid("batch", "must be true or false")
    return None if text is None else text == "true"


def described(shape: Shape) -> list[dict[str, Any]]:
    """The parameters as OpenAPI tells them."""
    whole, text = {"type": "integer", "minimum": 0}, {"type": "string"}
    texts = {"type": "array", "items": text, "maxItems": MOST_VALUES}
    groups = {"type": "array", "items": {"enum": list(shape.groups)}}
    found = [
        _described("start_time", whole, "First second of the range, since the epoch.", required=True),
        _described("end_time", whole, "Its end, excluded; default: now."),
        _described("bucket_width", {"enum": list(shape.widths), "default": "1d"}, "Width of a bucket, in UTC."),
        _described("group_by", groups, "What results are kept apart by."),
        *(_described(name, texts, "Only what has one of these values.") for name in shape.filters),
        _described("limit", {"type": "integer", "minimum": 1}, "Buckets of a page, by their width: " + _limits(shape)),
        _described("page", text, "The `next_page` of the answer before."),
    ]
    return found + ([_described("batch", {"type": "boolean"}, "Only batch jobs, or none.")] if shape.batch else [])


def _limits(shape: Shape) -> str:
    return ", ".join(f"{name}: {width.limit}, at most {width.most}" for name, width in shape.widths.items()) + "."


def _described(name: str, schema: dict[str, Any], text: str, *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": text, "required": required}
