"""How lists are paged: `limit` and `after`, answered with `has_more` and `next`.

`next` is what the following call passes as `after`; it is null on the last page. A page is read with one
item more than asked for, so `has_more` costs no second query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Generic, TypeVar

import msgspec
from litestar.params import QueryParameter

T = TypeVar("T")
S = TypeVar("S")

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

Limit = Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT, description="At most this many items.")]
After = Annotated[str | None, QueryParameter(description="The `next` of the page before.", max_length=1024)]


class Page(msgspec.Struct, Generic[T], kw_only=True):
    """One page of a list."""

    data: list[T]
    has_more: bool = False
    next: str | None = None


def page(found: Sequence[S], limit: int, show: Callable[[S], T], cursor: Callable[[S], str]) -> Page[T]:
    """Cut `found` (read with `limit + 1`) to a page; `cursor` names an item for `after`."""
    shown, has_more = found[:limit], len(found) > limit
    return Page(data=[show(item) for item in shown], has_more=has_more, next=cursor(shown[-1]) if has_more else None)
