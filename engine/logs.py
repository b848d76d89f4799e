"""How a server's log lines look, in the gateway's process and in the engine's: one line an event, JSON unless a person
watches, on standard error.

Knows: structlog's loggers and those of the standard library, which most rooms and all libraries use; both end in the
same processors. Does not know: who logs what.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

ROOMS = ("billing", "engine", "gateway", "kernels", "metering", "migrations")
CHATTY = ("uvicorn",)  # worth reading for who debugs


def configure_logging(level: str, form: str) -> None:
    """For the whole process, once. `level` counts for the rooms; what libraries say below a warning is not shown, as it
    may hold what must not be logged. `form` is auto, json or console.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    renderer = _renderer(form)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(number)  # a library may have set its own logger's level
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    quiet = max(number, logging.WARNING)
    logging.basicConfig(level=quiet, handlers=[handler])
    for name in ROOMS:
        logging.getLogger(name).setLevel(number)
    for name in CHATTY:
        logging.getLogger(name).setLevel(number if number <= logging.DEBUG else quiet)


def _renderer(form: str) -> Any:
    if form == "console" or (form == "auto" and sys.stderr.isatty()):
        # Plain: the rich traceback shows the values of variables, and a secret may be among them.
        return structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    return structlog.processors.JSONRenderer()
