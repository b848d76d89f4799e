"""What a first `make serve` has to show: two tenants with keys, adapters, a price and credit.

Knows: the admin API, over which it makes everything, as a person would. Does not know how any of it is stored. Safe to
be killed and run again: each call has its own idempotency key, and a tenant that exists ends it.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx
from litestar import Litestar

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
    async with httpx.AsyncClient(transport=transport, base_url=f"{url}/admin/v1", headers=headers) as admin:
        if (await admin.get(f"/tenants/{TENANTS[0][0]}")).status_code == 200:
            return [
                f"The demo tenants {' and '.join(id for id, _ in TENANTS)} are there from an earlier start.",
                f"Their keys were shown once; a new one: meterhouse key create {TENANTS[0][0]} another",
            ]
        await _post(admin, "/prices", {"model": "*", "effective_at": _EPOCH, "currency": "usd", "per_million": PRICE})
        keys = {}
        adapters = sorted(path for path in ADAPTERS.glob("*") if (path / "adapter_config.json").is_file())
        for number, (id, name) in enumerate(TENANTS):
            keys[id] = await _tenant(admin, id, name, adapters[number :: len(TENANTS)])
    return _lines(url, model, keys, adapters)


_EPOCH = "2026-01-01T00:00:00Z"


async def _tenant(admin: httpx.AsyncClient, id: str, name: str, adapters: list[Path]) -> str:
    await _post(admin, "/tenants", {"id": id, "name": name})
    await _post(admin, f"/tenants/{id}/credits", {"amount": CREDIT, "currency": "usd", "reason": "demo"})
    for folder in adapters:
        await _post(admin, f"/tenants/{id}/adapters", {"name": folder.name, "path": str(folder)})
    key: str = (await _post(admin, f"/tenants/{id}/keys", {"name": "demo"}))["key"]
    return key


async def _post(admin: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await admin.post(path, json=body, timeout=120.0)
    if response.is_success:
        return response.json()
    raise DemoError(f"the demo could not be made: {path}: {response.json()['error']['message']}")


def python(executable: str, folder: Path) -> str:
    """The running interpreter, which has what the line needs, as a shell takes it; short where it lies in `folder`."""
    path = Path(executable)  # not resolved: the link in a virtual environment is what makes it that environment's
    return shlex.quote(str(path.relative_to(folder) if path.is_relative_to(folder) else path))


def _lines(url: str, model: str, keys: dict[str, str], adapters: list[Path]) -> list[str]:
    first = TENANTS[0][0]
    messages = [{"role": "user", "content": "Give me three tips for a good night of sleep."}]
    ask = json.dumps(
        {"model": model, "messages": messages, "temperature": 0.2, "max_tokens": 200, "stream": True},
        separators=(",", ":"),
    )
    served = [
        f"  {id:8} {keys[id]}   models: {', '.join([model, *(a.name for a in adapters[number :: len(TENANTS)])])}"
        for number, (id, _) in enumerate(TENANTS)
    ]
    return [
        "",
        "Demo tenants and their keys (shown this once):",
        *served,
        "",
        "Try it:",
        f"  curl -N {url}/v1/chat/completions -H 'Authorization: Bearer {keys[first]}' \\",
        f"    -H 'Content-Type: application/json' -d '{ask}'",
        "",
        f'  {python(sys.executable, Path.cwd())} -c "from openai import OpenAI; '
        f"print(OpenAI(base_url='{url}/v1', api_key='{keys[first]}')"
        f".chat.completions.create(model='{model}', messages=[dict(role='user', content='Hello!')],"
        "temperature=0.2, max_tokens=60)"
        '.choices[0].message.content)"',
        "",
    ]
