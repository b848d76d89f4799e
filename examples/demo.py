"""A short real story: three tenants stream at once, one client hangs up, and every token lands on an invoice.

Starts its own `meterhouse serve` with an empty data folder and a Stripe double; with `--url` (METERHOUSE_URL) it
plays against a server that runs, whose admin key is in METERHOUSE_ADMIN_KEY. Ends with exit code 0 only when usage x
prices, the invoices and Stripe agree to the last digit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
STRIPE_KEY = "sk_test_meterhouse"
STREAMS, MAX_TOKENS, CUT_AFTER = 4, 40, 5

# Per million tokens: dear enough that a few hundred tokens make dollars, and odd enough that rounding has work to do.
PRICES = {"prompt": "2500.000000007", "cached": "250.50", "completion": "12500.123456789"}
ADAPTER_PRICES = {"prompt": "3000.10", "cached": "300.01", "completion": "15000.999999999"}

SYSTEM = "You are a careful assistant who answers in short, complete sentences and never makes anything up. " * 2
QUESTIONS = [
    "Why is the sky blue?",
    "Name three uses of salt.",
    "What does a lighthouse do?",
    "Why do cats purr?",
]

console = Console(width=None if sys.stdout.isatty() else 140)


class Broken(Exception):
    """The story does not hold; the text says where."""


def check(holds: bool, what: str) -> None:
    """One promise of the story: printed when kept, fatal when not."""
    if not holds:
        raise Broken(what)
    console.print(f"  [green]✓[/green] {what}", highlight=False)


@dataclass
class Tenant:
    """One customer, and what its own clients saw."""

    id: str
    name: str
    prices: dict[str, str]
    adapter: Path | None
    key: str = ""
    model: str = ""
    finished: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    answer: str = ""
    cut_received: int = 0
    invoice: dict[str, Any] = field(default_factory=dict)


# --- the stage: a Stripe double and a server -----------------------------------------------------


@contextmanager
def process(
    command: list[str], environment: dict[str, str], log: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A child that is ended with the story."""
    sink = log.open("w") if log else None
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=sink or subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # an interrupt of the story reaches it once, from here
    )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout:
            child.stdout.close()
        if sink:
            sink.close()


def start_stripe(stack: ExitStack) -> str:
    """Start the Stripe double; its first line says where it listens."""
    child = stack.enter_context(process([sys.executable, "-m", "tests.doubles.stripe"], dict(os.environ)))
    assert child.stdout is not None
    line = child.stdout.readline()
    found = re.search(r"http://\S+", line)
    if found is None:
        raise Broken(f"the Stripe double did not start: {line.strip() or 'it said nothing'}")
    return found[0]


def start_server(stack: ExitStack, stripe_url: str) -> tuple[str, str]:
    """Start a server of our own on a free port with an empty data folder. Returns its URL and admin key."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meterhouse-demo-")))
    admin_key = secrets.token_urlsafe(24)
    environment = {name: value for name, value in os.environ.items() if name != "METERHOUSE_URL"}
    environment |= {
        "METERHOUSE_ADMIN_KEY": admin_key,
        "METERHOUSE_DATA_DIR": str(folder / "data"),
        "STRIPE_API_KEY": STRIPE_KEY,
        "STRIPE_API_BASE": stripe_url,
    }
    port = free_port()
    log = folder / "server.log"
    command = [sys.executable, "-m", "gateway.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    child = stack.enter_context(process(command, environment, log))
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 600  # the first start fetches and converts the model
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise Broken("the server did not start:\n" + log.read_text()[-3000:])
        try:
            if httpx.get(f"{url}/health/ready", timeout=10).status_code == 200:
                return url, admin_key
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    raise Broken("the server was not ready within ten minutes:\n" + log.read_text()[-3000:])


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Admin:
    """The admin API; an answer that is an error ends the story with its sentence."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(base_url=f"{url}/admin/v1", headers={"authorization": f"Bearer {key}"}, timeout=120)

    def raw(self, method: str, path: str, body: dict[str, Any] | None = None, **query: str) -> httpx.Response:
        return self._client.request(method, path, json=body, params=query)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        answer = self.raw(method, path, body, **query)
        if answer.is_error:
            raise Broken(f"{method} {path} was answered {answer.status_code}: {answer.text}")
        return answer.json() if answer.content else None


# --- act one: customers --------------------------------------------------------------------------


def cast(run: str) -> list[Tenant]:
    """One tenant on the base model and two with adapters of their own, as far as there are any."""
    folders = [ROOT / "examples" / "adapters" / name for name in ("pirate", "haiku")]
    folders = [folder for folder in folders if (folder / "adapter_config.json").is_file()]
    names = [("acme", "Acme Analytics", None)] + [
        (folder.name, f"{folder.name.title()} & Sons", folder) for folder in folders
    ]
    names += [("globex", "Globex", None), ("initech", "Initech", None)][: 3 - len(names)]
    return [
        Tenant(f"{short}-{run}", name, ADAPTER_PRICES if adapter else PRICES, adapter) for short, name, adapter in names
    ]


def open_accounts(admin: Admin, tenants: list[Tenant], start: str) -> None:
    """Tenant, key, adapter, prices and prepaid credit for each."""
    for tenant in tenants:
        admin.call("POST", "/tenants", {"id": tenant.id, "name": tenant.name, "currency": "usd"})
        tenant.key = admin.call("POST", f"/tenants/{tenant.id}/keys", {"name": "demo"})["key"]
        if tenant.adapter:
            tenant.model = tenant.adapter.name
            body = {"name": tenant.model, "path": str(tenant.adapter)}
            admin.call("POST", f"/tenants/{tenant.id}/adapters", body)
        price = {"tenant": tenant.id, "model": "*", "effective_at": start, "currency": "usd"}
        admin.call("POST", "/prices", price | {"per_million": tenant.prices})
        credit = {"amount": "100.00", "currency": "usd", "reason": "demo"}
        admin.call("POST", f"/tenants/{tenant.id}/credits", credit)


# --- act two: streams ----------------------------------------------------------------------------


async def serve_all(url: str, tenants: list[Tenant]) -> None:
    """One stream each to warm the prefix cache, then all at once; the first tenant hangs up on one of its own."""
    clients = {
        tenant.id: AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key, max_retries=0, timeout=120)
        for tenant in tenants
    }
    try:
        for tenant in tenants:
            if not tenant.model:
                models = await clients[tenant.id].models.list()
                tenant.model = models.data[0].id
        await asyncio.gather(*(stream(clients[tenant.id], tenant, QUESTIONS[0]) for tenant in tenants))
        await asyncio.gather(
            hang_up(clients[tenants[0].id], tenants[0]),
            *(
                stream(clients[tenant.id], tenant, QUESTIONS[index % len(QUESTIONS)])
                for tenant in tenants
                for index in range(STREAMS)
            ),
        )
    finally:
        for client in clients.values():
            await client.close()


def ask(question: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


async def stream(client: AsyncOpenAI, tenant: Tenant, question: str) -> None:
    """A whole answer; its last chunk carries the usage that the client may believe."""
    chunks = await client.chat.completions.create(
        model=tenant.model,
        messages=ask(question),
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text = ""
    async for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
        if chunk.usage:
            details = chunk.usage.prompt_tokens_details
            tenant.prompt += chunk.usage.prompt_tokens
            tenant.cached += (details.cached_tokens if details else 0) or 0
            tenant.completion += chunk.usage.completion_tokens
            tenant.finished += 1
    tenant.answer = tenant.answer or text


async def hang_up(client: AsyncOpenAI, tenant: Tenant) -> None:
    """Close the connection after five tokens of a long answer."""
    chunks = await client.chat.completions.create(
        model=tenant.model,
        messages=ask("Tell me a long story about a ship."),
        max_tokens=400,
        temperature=0,
        logprobs=True,  # one entry a token: that is how a client can count
        stream=True,
    )
    async for chunk in chunks:
        if chunk.choices and chunk.choices[0].logprobs:
            tenant.cut_received += len(chunk.choices[0].logprobs.content or [])
        if tenant.cut_received >= CUT_AFTER:
            break
    await chunks.close()


# --- act three: the bill -------------------------------------------------------------------------


def settled(admin: Admin, tenants: list[Tenant], start: str) -> list[dict[str, Any]]:
    """Usage by model, once every request is in it."""
    wanted = {tenant.id: tenant.finished + (1 if tenant.cut_received else 0) for tenant in tenants}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        rows = [
            row
            for tenant in tenants
            for row in admin.call("GET", "/usage", tenant=tenant.id, start=start, bucket="day", group_by="model")[
                "data"
            ]
        ]
        seen = {tenant.id: sum(row["requests"] for row in rows if row["tenant"] == tenant.id) for tenant in tenants}
        if seen == wanted:
            return rows
        time.sleep(0.3)
    raise Broken(f"usage has {seen} requests where {wanted} were made")


def cut_invoice(admin: Admin, tenant: Tenant, start: str, end: str) -> None:
    """Draft (as soon as the period is closed), finalize."""
    body = {"tenant": tenant.id, "period_start": start, "period_end": end}
    for _ in range(30):
        answer = admin.raw("POST", "/invoices", body)
        if answer.status_code != 409 or "retry-after" not in answer.headers:
            break
        time.sleep(float(answer.headers["retry-after"]))
    if answer.is_error:
        raise Broken(f"no invoice for {tenant.name}: {answer.text}")
    tenant.invoice = admin.call("POST", f"/invoices/{answer.json()['id']}/finalize")


def export(admin: Admin, tenant: Tenant) -> bool:
    """Send the invoice to Stripe. False when the server has no Stripe key."""
    answer = admin.raw("POST", f"/invoices/{tenant.invoice['id']}/export")
    if answer.status_code == 409 and answer.json()["error"]["code"] == "stripe_not_configured":
        console.print(f"  the server exports nothing: {answer.json()['error']['message']}")
        return False
    if answer.is_error:
        raise Broken(f"{tenant.name}'s invoice was not exported: {answer.text}")
    tenant.invoice = answer.json()
    return True


def stripe_invoice(stripe_url: str, invoice: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Stripe's own invoice, and its items' amounts by our line id."""
    with httpx.Client(base_url=stripe_url, auth=(STRIPE_KEY, "")) as client:
        found = client.get(f"/v1/invoices/{invoice['stripe_invoice_id']}").raise_for_status().json()
        items = client.get("/v1/invoiceitems", params={"invoice": found["id"], "limit": 100}).raise_for_status().json()
    return found, {item["metadata"]["meterhouse_line"]: item["amount"] for item in items["data"]}


def cents(text: str) -> int:
    return int(Decimal(text) * 100)


def verify_usage(tenant: Tenant, rows: list[dict[str, Any]]) -> None:
    """Usage is what the clients were told, and its amount is usage x price."""
    own = [row for row in rows if row["tenant"] == tenant.id]
    prompt, cached, completion = (
        sum(row[f"{name}_tokens"] for row in own) for name in ("prompt", "cached", "completion")
    )
    if tenant.cut_received:
        check(
            completion >= tenant.completion + tenant.cut_received,
            f"{tenant.name}: the cut stream is billed {completion - tenant.completion} tokens, "
            f"its client got {tenant.cut_received} before it hung up",
        )
    else:
        check(
            (prompt, cached, completion) == (tenant.prompt, tenant.cached, tenant.completion),
            f"{tenant.name}: usage equals what the clients were told, token for token",
        )
    price = {name: Decimal(text) / 1_000_000 for name, text in tenant.prices.items()}
    amount = (prompt - cached) * price["prompt"] + cached * price["cached"] + completion * price["completion"]
    exact, total = Decimal(tenant.invoice["exact_total"]), Decimal(tenant.invoice["total"])
    check(
        amount == sum(Decimal(row["amount"]) for row in own) == exact,
        f"{tenant.name}: usage × prices = {amount.normalize():f} = the invoice, to the last digit",
    )
    by_class = {"prompt": prompt - cached, "cached": cached, "completion": completion}
    for line in tenant.invoice["lines"]:
        by_class[line["token_class"]] -= line["quantity"]
        if Decimal(line["exact"]) != line["quantity"] * Decimal(line["unit_price"]) / 1_000_000:
            raise Broken(f"line {line['id']} is not quantity × price")
    check(not any(by_class.values()), f"{tenant.name}: every token stands on exactly one line")
    check(
        total
        == exact.quantize(Decimal("0.01"), ROUND_HALF_EVEN)
        == sum(Decimal(li["amount"]) for li in tenant.invoice["lines"]),
        f"{tenant.name}: the lines sum to {total}, rounded once",
    )


def verify_stripe(tenant: Tenant, stripe_url: str) -> None:
    found, items = stripe_invoice(stripe_url, tenant.invoice)
    ours = {line["id"]: cents(line["amount"]) for line in tenant.invoice["lines"]}
    check(
        items == ours and found["total"] == cents(tenant.invoice["total"]),
        f"{tenant.name}: Stripe holds the same {len(items)} lines and ${found['total'] / 100:.2f} ({found['status']})",
    )


def verify_books(admin: Admin, start: str) -> None:
    """Every record of the same tokens says the same; what is still on its way is waited for."""
    deadline = time.monotonic() + 30
    report = admin.call("GET", "/reconcile", start=start)
    while not report["ok"] and time.monotonic() < deadline:
        time.sleep(0.5)
        report = admin.call("GET", "/reconcile", start=start)
    check(report["ok"], f"reconcile finds no difference {report['differences'] or ''}".rstrip())


# --- what the audience sees ----------------------------------------------------------------------


def print_usage(tenants: list[Tenant], rows: list[dict[str, Any]]) -> None:
    table = Table(title="Usage", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("tenant", "model"):
        table.add_column(name)
    for name in ("requests", "prompt", "cached", "completion", "amount, exact"):
        table.add_column(name, justify="right")
    names = {tenant.id: tenant.name for tenant in tenants}
    for row in rows:
        counts = (str(row[name]) for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens"))
        table.add_row(names[row["tenant"]], row["model"], *counts, f"${row['amount']}")
    console.print(table)


def print_invoice(tenant: Tenant) -> None:
    invoice = tenant.invoice
    where = f"Stripe {invoice['stripe_invoice_id']}" if invoice["stripe_invoice_id"] else "not at Stripe"
    console.print(
        f"Invoice {invoice['id']} for [bold]{tenant.name}[/bold] ({invoice['status']}, {where})", highlight=False
    )
    table = Table(box=None, padding=(0, 2, 0, 0), show_footer=True)
    table.add_column("model", footer="total")
    table.add_column("tokens")
    table.add_column("quantity", justify="right")
    table.add_column("per million", justify="right")
    table.add_column("exact", justify="right", footer=invoice["exact_total"])
    table.add_column(invoice["currency"], justify="right", footer=invoice["total"])
    for line in invoice["lines"]:
        cells = (line["model"], line["token_class"], str(line["quantity"]), line["unit_price"])
        table.add_row(*cells, line["exact"], line["amount"])
    console.print(table)


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def play(url: str, admin_key: str, stripe_url: str | None) -> None:
    """The three acts."""
    admin, tenants = Admin(url, admin_key), cast(secrets.token_hex(3))
    start = rfc3339(time.time())
    open_accounts(admin, tenants, start)
    console.print(f"\n[bold]Three tenants stream at once[/bold] from {url}")
    asyncio.run(serve_all(url, tenants))
    for tenant in tenants:
        cut = f", one cut after {tenant.cut_received} tokens" if tenant.cut_received else ""
        said = " ".join(tenant.answer.split())[:70]
        console.print(f"  {tenant.name} ({tenant.model}): {tenant.finished} answers{cut}. “{said}…”", highlight=False)
    rows = settled(admin, tenants, start)
    end = rfc3339(time.time())
    console.print("\n[bold]Invoices are cut, finalized and exported[/bold]")
    for tenant in tenants:
        cut_invoice(admin, tenant, start, end)
    exported = [export(admin, tenant) for tenant in tenants]
    console.print()
    print_usage(tenants, rows)
    for tenant in tenants:
        console.print()
        print_invoice(tenant)
    console.print("\n[bold]Do they agree?[/bold]")
    for tenant in tenants:
        verify_usage(tenant, rows)
        if all(exported) and stripe_url:
            verify_stripe(tenant, stripe_url)
    verify_books(admin, start)
    total = sum(Decimal(tenant.invoice["total"]) for tenant in tenants)
    console.print(f"\n[bold green]Every token is accounted for: ${total} on {len(tenants)} invoices.[/bold green]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default=os.environ.get("METERHOUSE_URL"), help="play against this server")
    parser.add_argument("--admin-key", default=os.environ.get("METERHOUSE_ADMIN_KEY"), help="its admin key")
    options = parser.parse_args()
    try:
        with ExitStack() as stack:
            if options.url:
                play(options.url.rstrip("/"), options.admin_key or "", None)
            else:
                console.print("Starting a server and a Stripe double…")
                stripe_url = start_stripe(stack)
                url, admin_key = start_server(stack, stripe_url)
                play(url, admin_key, stripe_url)
    except Broken as error:
        console.print(f"\n[bold red]The story does not hold:[/bold red] {error}", highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
