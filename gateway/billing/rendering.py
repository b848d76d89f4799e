"""A statement as an answer: HTML that a browser shows, or CSV that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

from litestar import Response
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import QueryParameter

from billing.statement import Statement, as_csv
from billing.statement_html import CONTENT_SECURITY, as_html


class StatementFormat(StrEnum):
    """How a statement is rendered."""

    HTML = "html"
    CSV = "csv"


Format = Annotated[StatementFormat, QueryParameter(description="html or csv.")]

RESPONSES: dict[int, ResponseSpec] = {
    200: ResponseSpec(str, generate_examples=False, description="The statement.", media_type="text/html")
}
"""What OpenAPI says of it."""

_RENDER: dict[StatementFormat, Callable[[Statement], bytes]] = {
    StatementFormat.HTML: as_html,
    StatementFormat.CSV: as_csv,
}


def rendered(statement: Statement, format: StatementFormat) -> Response[Any]:
    """The answer. Takes milliseconds, of a long statement a second: not on the event loop."""
    shown = "inline" if format is StatementFormat.HTML else "attachment"
    return Response(
        _RENDER[format](statement),
        media_type=f"text/{format}",
        headers={
            "cache-control": "private, no-store",
            "content-disposition": f'{shown}; filename="statement-{statement.invoice}.{format}"',
            "content-security-policy": f"{CONTENT_SECURITY}; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
        },
    )
