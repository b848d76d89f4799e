"""What a first `make serve` has to show: two tenants with keys, adapters, a price and credit.

Knows: the admin API, over which it makes everything, as a person would. Does not know how any of it is stored. Safe to
be killed and run again: a tenant's key is made last, so one that has any key is whole and left alone; for the others
each call has an idempotency key that says what is asked for.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx
from litestar import Litestar

from gateway import paths

ADAPTERS = Path(__file__).resolve().parent.parent / "examples" / "adapters"
TENANTS = (("acme", "Acme"), ("globex", "Globex"))
PRICE = {"prompt": "0.50", "cached": "0.05", "completion": "1.50"}
CREDIT = "10.00"


class DemoError(Exception):
    """The admin API refused a step."""


async def prepare(app: Litestar, admin_key: str, url: str, model: str) -> list[str]:
    """Make the demo on a first start; the lines to print."""
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]  # litestar is an ASGI application
    headers = {"authorization": f"Bearer {admin_key}"}
    async with httpx.AsyncClient(transport=transport, base_url=f"{url}{paths.ADMIN}", headers=headers) as admin:
        adapters = sorted(path for path in ADAPTERS.glob("*") if (path / "adapter_config.json").is_file())
        missing = [number for number, (id, _) in enumerate(TENANTS) if not await _is_whole(admin, id)]
        if missing:
            price = {"model": "*", "effective_at": _EPOCH, "currency": "usd", "per_million": PRICE}
            await _post(admin, "/prices", price)
        keys = {}
        for number in missing:
            id, name = TENANTS[number]
            keys[id] = await _tenant(admin, id, name, adapters[number :: len(TENANTS)])
    return _lines(url, model, keys, adapters)


_EPOCH = "2026-01-01T00:00:00Z"


async def _is_whole(admin: httpx.AsyncClient, id: str) -> bool:
    """Whether the tenant has a key, or had one that was revoked."""
    response = await admin.get(f"/tenants/{id}/keys", params={"limit": 1})
    if response.status_code == httpx.codes.NOT_FOUND:
        return False
    return bool(_answer(f"/tenants/{id}/keys", response)["data"])


async def _tenant(admin: httpx.AsyncClient, id: str, name: str, adapters: list[Path]) -> str:
    await _post(admin, "/tenants", {"id": id, "name": name})
    await _post(admin, f"/tenants/{id}/credits", {"amount": CREDIT, "currency": "usd", "reason": "demo"})
    for folder in adapters:
        await _post(admin, f"/tenants/{id}/adapters", {"name": folder.name, "path": str(folder)})
    key: str = (await _post(admin, f"/tenants/{id}/keys", {"name": "demo"}))["key"]
    return key


async def _post(admin: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    asked = hashlib.sha256(json.dumps([path, body]).encode()).hexdigest()
    headers = {"idempotency-key": f"demo-{asked}"}
    return _answer(path, await admin.post(path, json=body, headers=headers, timeout=120.0))


def _answer(path: str, response: httpx.Response) -> Any:
    if response.is_success:
        return response.json()
    raise DemoError(f"the demo could not be made: {path}: {response.json()['error']['message']}")


def python(executable: str, folder: Path) -> str:
    """The running interpreter, which has what the line needs, as a shell takes it; short where it lies in `folder`."""
    path = Path(executable)  # not resolved: the link in a virtual environment is what makes it that environment's
    return shlex.quote(str(path.relative_to(folder) if path.is_relative_to(folder) else path))


def _lines(url: str, model: str, keys: dict[str, str], adapters: list[Path]) -> list[str]:
    """`keys` are those that were made just now, by tenant."""
    there = [id for id, _ in TENANTS if id not in keys]
    again = [
        f"The demo tenant {id} is there from an earlier start; its key was shown then. A new one: {new_key(id)}"
        for id in there
    ]
    if not keys:
        return again
    served = [
        f"  {id:8} {keys[id]}   models: {', '.join([model, *(a.name for a in adapters[number :: len(TENANTS)])])}"
        for number, (id, _) in enumerate(TENANTS)
        if id in keys
    ]
    return [*again, "", "Demo tenants and their keys (shown this once):", *served, "", *_tries(url, model, keys)]


def new_key(tenant: str) -> str:
    return f"meterhouse key create {tenant} --name another"


def _tries(url: str, model: str, keys: dict[str, str]) -> list[str]:
    key = next(iter(keys.values()))
    messages = [{"role": "user", "content": "Give me three tips for a good night of sleep."}]
    ask = json.dumps(
        {"model": model, "messages": messages, "temperature": 0.2, "max_tokens": 200, "stream": True},
        separators=(",", ":"),
    )
    return [
        "Try it:",
        f"  curl -N {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\",
        f"    -H 'Content-Type: application/json' -d '{ask}'",
        "",
        f'  {python(sys.executable, Path.cwd())} -c "from openai import OpenAI; '
        f"print(OpenAI(base_url='{url}/v1', api_key='{key}')"
        f".chat.completions.create(model='{model}', messages=[dict(role='user', content='Hello!')],"
        "temperature=0.2, max_tokens=60)"
        '.choices[0].message.content)"',
        "",
    ]
