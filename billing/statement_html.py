"""A statement as one page of HTML: nothing outside it is asked for, nothing in it runs, every text is escaped.

For a screen, for paper of any size and for a screen reader (https://www.w3.org/TR/WCAG22/): headings, captions, the
scope of each heading cell. Pure, but for the template that lies beside it.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import jinja2

from billing.statement import Statement

CONTENT_SECURITY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""What a browser is told to let the page do: have a style."""


def as_html(statement: Statement) -> bytes:
    """The page, UTF-8."""
    return _template().render(statement=statement, content_security=CONTENT_SECURITY).encode()


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string((resources.files("billing") / "statement.html").read_text(encoding="utf-8"))
