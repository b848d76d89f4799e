"""The admin API as the command line calls it: a running server's, or the same app in this process.

chDB has one owner and so has the spool: beside a running server only that server may touch the data folder. When
none runs, the app is opened here on the data folder, without an engine, and spoken to over the same routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
from anyio.from_thread import start_blocking_portal

from gateway import paths
from gateway.keyfile import admin_key
from gateway.settings import Settings
from metering.lock import held

TIMEOUT = httpx.Timeout(300.0, connect=3.0)  # an export or the unloading of an adapter takes its time

Query = dict[str, str | int | None]
Send = Callable[[httpx.Request], httpx.Response]
OpenApp = Callable[[Settings], AbstractContextManager[Any]]  # an ASGI application, for as long as the context lasts


class CallFailed(Exception):
    """The API said no, or could not be reached; the text is one clear sentence."""


class AdminClient:
    """Calls to the admin API. Every method returns the decoded JSON or raises `CallFailed`.

    A `{}` in a path is filled by the next of `parts`, quoted.
    """

    def __init__(self, base_url: str, admin_key: str, send: Send) -> None:
        self._base_url = base_url.rstrip("/") + paths.ADMIN
        self._headers = {"authorization": f"Bearer {admin_key}"}
        self._send = send

    def get(self, path: str, *parts: str, query: Query | None = None) -> Any:
        return self._call("GET", path, parts, query=query)

    def text(self, path: str, *parts: str, query: Query | None = None) -> str:
        """What is no JSON: a page, a table."""
        return self._answer("GET", path, parts, query=query).text

    def post(self, path: str, *parts: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, parts, body=body)

    def put(self, path: str, *parts: str, body: dict[str, Any]) -> Any:
        return self._call("PUT", path, parts, body=body)

    def patch(self, path: str, *parts: str, body: dict[str, Any]) -> Any:
        return self._call("PATCH", path, parts, body=body)

    def delete(self, path: str, *parts: str) -> Any:
        return self._call("DELETE", path, parts)

    def pages(self, path: str, *parts: str, **query: str | int | None) -> Iterator[dict[str, Any]]:
        """Every item of a list, page after page."""
        after: str | None = None
        while True:
            found = self.get(path, *parts, query={**query, "after": after})
            yield from found["data"]
            after = found["next"]
            if after is None:
                return

    def _call(
        self,
        method: str,
        path: str,
        parts: tuple[str, ...],
        *,
        query: Query | None = None,
        body: dict[str, Any] | None = None,
    ) -> Any:
        response = self._answer(method, path, parts, query=query, body=body)
        return msgspec.json.decode(response.content) if response.content else None

    def _answer(
        self,
        method: str,
        path: str,
        parts: tuple[str, ...],
        *,
        query: Query | None = None,
        body: dict[str, Any] | None = None,
    ) -> httpx.Response:
        request = httpx.Request(
            method,
            self._base_url + path.format(*(quote(part, safe="") for part in parts)),
            params={name: value for name, value in (query or {}).items() if value is not None},
            headers=self._headers,
            json=body,
            extensions={"timeout": TIMEOUT.as_dict()},
        )
        try:
            response = self._send(request)
        except httpx.ConnectError:
            raise CallFailed(f"no server answers at {self._base_url}") from None
        except httpx.TimeoutException:
            raise CallFailed(f"{self._base_url} did not answer in time; the call may have taken effect") from None
        except httpx.HTTPError as error:
            raise CallFailed(f"the call to {self._base_url} broke off ({type(error).__name__})") from None
        if response.is_success:
            return response
        raise CallFailed(_reason(response))


def _reason(response: httpx.Response) -> str:
    try:
        message = msgspec.json.decode(response.content)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the server answered {response.status_code} with a body that is not Meterhouse's"
    return str(message)


@contextmanager
def connect(settings: Settings, open_app: OpenApp, folder_named: bool = False) -> Iterator[AdminClient]:
    """The API of the server that runs where the settings say; when none does, the app that `open_app` opens here.

    `folder_named`: somebody means this data folder. Raises `CallFailed`, also when a server answers that is not this
    folder's: the books of another would be taken for those that were asked for.
    """
    answers = _answers(settings.base_url)
    if answers and folder_named and settings.data_dir.is_dir() and not held(settings.data_dir / "server.lock"):
        raise CallFailed(
            f"a server answers at {settings.base_url}, but none runs on the data folder {settings.data_dir}: leave "
            "--data-dir out to speak to that server, or name for this folder a --port that nobody listens on"
        )
    opened = _remote(settings) if answers else _in_process(settings, open_app)
    with opened as client:
        yield client


def _answers(base_url: str) -> bool:
    """Whether a server listens there. Raises `CallFailed` when it is another one: the admin key is not for it."""
    try:
        response = httpx.get(base_url + paths.LIVE, timeout=3.0)
    except httpx.TransportError:
        return False
    try:
        product = msgspec.json.decode(response.content)["product"]
    except (msgspec.DecodeError, KeyError, TypeError):
        product = None
    if product == paths.PRODUCT:
        return True
    raise CallFailed(
        f"what answers at {base_url} is not Meterhouse: name its server with --host and --port, or for a data folder "
        "without a server a port that nobody listens on"
    )


@contextmanager
def _remote(settings: Settings) -> Iterator[AdminClient]:
    if settings.admin_key is None and not settings.admin_key_file.exists():
        raise CallFailed(
            f"a server answers at {settings.base_url}, but its admin key is not known here: set METERHOUSE_ADMIN_KEY, "
            "or name the server's data folder with --data-dir"
        )
    with httpx.Client(timeout=TIMEOUT) as client:
        yield AdminClient(settings.base_url, admin_key(settings), client.send)


@contextmanager
def _in_process(settings: Settings, open_app: OpenApp) -> Iterator[AdminClient]:
    if not settings.data_dir.is_dir():
        raise CallFailed(
            f"no server answers at {settings.base_url} and there is no data folder {settings.data_dir}: start a server "
            "with `meterhouse serve`, or name another with --host, --port or --data-dir"
        )
    with open_app(settings) as app, start_blocking_portal() as portal:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        yield AdminClient(settings.base_url, admin_key(settings), partial(portal.call, client.send))
