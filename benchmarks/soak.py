"""Thousands of requests of every kind against one server: what is left of them afterwards must be nothing.

    python benchmarks/soak.py                                   # 500 requests to warm up, then 2,000; minutes
    python benchmarks/soak.py --requests 20000 --out soak.jsonl

`meterhouse serve` is started with little of everything (a small KV cache, few adapter slots, memory for some of the
adapters), so that blocks are evicted, requests preempted and adapters read again all the time. Adapters are taken
away, brought back and replaced meanwhile, clients go away, money ends, requests are refused. In the end memory must
have stayed what it was, and all that was taken must have been given back. Exit code 1 where it was not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import loras
import msgspec
from mixture import CUT, OK, Mixture, Wish
from processes import Course, Handles, Memory, child, handles, memory
from rich.console import Console
from rich.table import Table
from servers import Absent, running

from engine.models.config import ModelConfig
from engine.tokens import Tokenizer
from engine.weights import resolve_model
from gateway.bench.client import Reply, Target, ask
from gateway.client import AdminClient, CallFailed
from kernels.native import default_cache_dir

CONCURRENCY = 32
SAMPLE_EVERY = 50  # requests
ENGINE_FLAT = 0.02
GATEWAY_GROWTH_MAX = 0.10
"""ClickHouse in the gateway's process grows with its inserts for a while: README."""
COST_ERROR_MAX = 0.01
POOLED = 8
"""Pools fill when first wanted: so many threads and descriptors more are no leak, which grows with requests."""
CALL_S = 60.0
IDLE_S = 60.0
SWAP_EVERY_S = 0.5

FLAGS = (
    "--kv-cache-bytes=402653184",  # the warm-up touches every block: its pages are taken when first written to
    "--max-model-len=2048",
    "--adapter-slots=3",
    "--adapter-cache-bytes=12582912",  # some of the adapters: the others are read again
    "--request-timeout-s=30",
    "--queue-timeout-s=25",
)
PROMPT_MAX, CONTEXT = 1500, 2048
CUT_S = 1.5

TENANTS = {"red": ("a", "b", "c", "red"), "green": ("a", "d", "green")}
"""Tenants who can pay, and the names of their adapters."""

RANDOM_ADAPTERS = {
    "a": (4, ("q_proj", "v_proj")),
    "b": (8, ("q_proj", "k_proj", "v_proj", "o_proj")),
    "c": (2, ("up_proj",)),
    "d": (16, ("gate_proj", "down_proj")),
}
"""Rank and projections, by name."""

POOR = "poor"
PRICE = {"prompt": "0.50", "cached": "0.05", "completion": "1.50"}
ALMS = "0.0001"  # now and then: some requests' worth


class Sample(msgspec.Struct, frozen=True):
    """Both processes' memory after so many requests."""

    requests: int
    engine: Memory
    gateway: Memory


class Check(msgspec.Struct, frozen=True):
    """One thing that must hold, and what was seen."""

    name: str
    holds: bool
    seen: str


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one answer, or of many together."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Ended(msgspec.Struct, frozen=True):
    """How one request ended, as its client saw it, and the usage that it was told."""

    how: str
    told: Usage | None = None


# --- reading an answer ---------------------------------------------------------------------------


class _Details(msgspec.Struct):
    cached_tokens: int


class _Told(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details


class _Error(msgspec.Struct):
    code: str | None = None


class _Body(msgspec.Struct):
    usage: _Told | None = None
    error: _Error | None = None


_bodies = msgspec.json.Decoder(_Body)


def read(reply: Reply) -> Ended:
    """How a whole answer ended, streamed or not. What is no answer is an end of its own name."""
    if reply.error:
        return Ended(reply.error)
    raw = b"".join(piece for _, piece in reply.pieces)
    streamed = raw.startswith((b"data:", b":"))
    if streamed and not raw.endswith(b"data: [DONE]\n\n"):
        return Ended("stream without its end")
    told: Usage | None = None
    lines = raw.split(b"\n") if streamed else [b"data:" + raw]
    for line in lines:
        if not line.startswith(b"data:") or line == b"data: [DONE]":
            continue
        body = _bodies.decode(line[5:])
        if body.error is not None:
            return Ended(body.error.code or f"error without a code, status {reply.status}")
        if body.usage is not None:
            usage = body.usage
            told = Usage(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)
    return Ended(OK, told)


# --- the server ----------------------------------------------------------------------------------


class Subject:
    """The server under the soak: its processes, its metrics, its administrator."""

    def __init__(self, url: str, admin_key: str, pid: int) -> None:
        self.url = url
        self.gateway_pid = pid
        self.engine_pid = child(pid, "engine.")
        self._client = httpx.Client(timeout=CALL_S)
        self.admin = AdminClient(url, admin_key, self._send)

    def close(self) -> None:
        self._client.close()

    def _send(self, request: httpx.Request) -> httpx.Response:
        """An adapter that is never unloaded shall show in a minute, not in the five that an administrator waits."""
        request.extensions["timeout"] = httpx.Timeout(CALL_S).as_dict()
        return self._client.send(request)

    def metrics(self) -> dict[str, float]:
        """The sum of each metric's series, by its name, and by its name and kind or outcome."""
        sums: dict[str, float] = {}
        for line in self._client.get(f"{self.url}/metrics").raise_for_status().text.splitlines():
            if line.startswith("#"):
                continue
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            kinds = [f"{name}.{kind}" for kind in re.findall(r'\b(?:kind|outcome)="(\w+)"', labels)]
            for key in (name, *kinds):
                sums[key] = sums.get(key, 0.0) + float(value)
        return sums

    def sample(self, requests: int) -> Sample:
        return Sample(requests, memory(self.engine_pid), memory(self.gateway_pid))

    def handles(self) -> tuple[Handles, Handles]:
        """Of the engine and of the gateway."""
        return handles(self.engine_pid), handles(self.gateway_pid)

    def prepare(self, adapters: dict[str, Path]) -> dict[str, str]:
        """Make the tenants, their money and their adapters; their keys."""
        keys: dict[str, str] = {}
        self.admin.post("/prices", body={"model": "*", "currency": "usd", "per_million": PRICE})
        for tenant in (*TENANTS, POOR):
            self.admin.post("/tenants", body={"name": tenant, "id": tenant, "currency": "usd"})
            keys[tenant] = str(self.admin.post(f"/tenants/{tenant}/keys", body={"name": "soak"})["key"])
            self.grant(tenant, ALMS if tenant == POOR else "1000000")
        for tenant, names in TENANTS.items():
            for name in names:
                self.load(tenant, name, adapters[name])
        return keys

    def grant(self, tenant: str, amount: str) -> None:
        self.admin.post(f"/tenants/{tenant}/credits", body={"amount": amount, "currency": "usd", "reason": "soak"})

    def load(self, tenant: str, name: str, folder: Path) -> None:
        self.admin.post(f"/tenants/{tenant}/adapters", body={"name": name, "path": str(folder.absolute())})

    def unload(self, tenant: str, name: str) -> None:
        """Returns when its last request has ended."""
        self.admin.delete(f"/tenants/{tenant}/adapters/{name}")

    def idle(self) -> dict[str, float]:
        """The metrics once nothing runs any more, or as they are when that does not come."""
        deadline = time.monotonic() + IDLE_S
        while True:
            seen = self.metrics()
            if not any(seen[name] for name in IDLE) or time.monotonic() > deadline:
                return seen
            time.sleep(0.25)


IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "meterhouse_open_requests",
    "meterhouse_holds_open",
)
"""Gauges that are 0 when nothing runs."""

NEVER = (
    "meterhouse_alarms_total",
    "meterhouse_engine_restarts_total",
    "meterhouse_settle_failures_total",
    "meterhouse_unrated_requests",
    "meterhouse_stuck_events",
)


# --- the load ------------------------------------------------------------------------------------


class Crowd:
    """Clients that ask all the time, and an administrator who changes adapters under them."""

    def __init__(
        self,
        subject: Subject,
        mixture: Mixture,
        keys: dict[str, str],
        adapters: dict[str, Path],
        *,
        concurrency: int,
        seed: int,
    ) -> None:
        self._subject = subject
        self._mixture = mixture
        self._targets = {name: Target.parse(f"{subject.url}/v1", api_key=key) for name, key in keys.items()}
        self._adapters = adapters
        self._concurrency = concurrency
        self._rng = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.told: dict[str, Usage] = {}  # by label
        self.samples: list[Sample] = []
        self.swaps = 0
        self.done = 0

    async def ask(self, requests: int) -> None:
        """So many requests, each as soon as a client is free."""
        self._left = requests
        swapping = asyncio.create_task(self._swap())
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(self._concurrency):
                    clients.create_task(self._client())
        finally:
            self._left = 0
            await swapping

    async def ask_plainly(self) -> None:
        """One request, while nothing else happens."""
        wish = self._mixture.plain()
        self._note(wish, await self._asked(wish))

    async def _client(self) -> None:
        while self._left > 0:
            self._left -= 1
            wish = self._mixture.draw()
            self._note(wish, await self._asked(wish))

    async def _asked(self, wish: Wish) -> Ended:
        target = self._targets[wish.tenant]
        try:
            async with asyncio.timeout(wish.cut_after_s):
                reply = await ask(target, target.request(wish.endpoint, msgspec.json.encode(wish.body)))
        except TimeoutError:
            return Ended(CUT)
        return read(reply)

    def _note(self, wish: Wish, ended: Ended) -> None:
        self.done += 1
        self.ends[ended.how] += 1
        if ended.how not in wish.ends:
            self.wrong.append(f"{ended.how}, not {' or '.join(sorted(wish.ends))}: {str(wish.body)[:300]}")
        if ended.told is not None:
            self.told[wish.label] = ended.told
        if self.done % SAMPLE_EVERY == 0:
            self.samples.append(self._subject.sample(self.done))
            say(f"  {self.done} requests, the engine has {self.samples[-1].engine.rss_bytes / 1e6:.1f} MB")

    async def _swap(self) -> None:
        while self._left > 0:
            try:
                await asyncio.to_thread(self._change)
            except CallFailed as error:
                self.wrong.append(f"an adapter could not be changed: {error}")
            self.swaps += 1
            await asyncio.sleep(SWAP_EVERY_S)

    def _change(self) -> None:
        """Replace an adapter, or take it away and bring it back; look at the server, and give to the poor."""
        tenant = self._rng.choice(list(TENANTS))
        name = self._rng.choice(TENANTS[tenant])
        if self._rng.random() < 0.5:
            self._subject.unload(tenant, name)
        self._subject.load(tenant, name, self._adapters[name])
        self._subject.metrics()
        if self._rng.random() < 0.5:
            self._subject.grant(POOR, ALMS)


# --- what must hold ------------------------------------------------------------------------------


def accounts(subject: Subject, crowd: Crowd, since_s: int) -> list[Check]:
    """The books after the last request: nothing is held, and all of them say the same."""
    seen = subject.idle()
    held = {name: subject.admin.get(f"/tenants/{name}/balance")["held"] for name in (*TENANTS, POOR)}
    report = subject.admin.get("/reconcile")
    events = {row["user"]: row for row in subject.admin.pages("/usage", start=str(since_s), group_by="user")}
    settled = _tokens(seen, "meterhouse_settled_tokens_total")
    stored = Usage(*(sum(row[name] for row in events.values()) for name in Usage.__struct_fields__))
    differ = [label for label, told in crowd.told.items() if msgspec.convert(events.get(label, {}), Usage) != told]
    spent_s = seen["meterhouse_settled_compute_seconds_total"] + seen["meterhouse_probe_compute_seconds_total"]
    busy_s = seen["meterhouse_engine_busy_seconds_total"]
    left = seen.get("meterhouse_requests_total.abort", 0)
    return [
        *(Check(name, seen[name] == 0, f"{seen[name]:g}") for name in (*IDLE, *NEVER)),
        Check("clients that left were noticed", left > 0, f"{left:g} aborts, {crowd.ends[CUT]} left"),
        Check("held, by tenant", not any(map(Decimal, held.values())), ", ".join(f"{k} {v}" for k, v in held.items())),
        Check("books agree (reconcile)", report["ok"], f"{len(report['differences'])} differences"),
        Check(
            "nothing open in the journal",
            all(row["journal"] is not None for row in report["rows"]),
            f"{sum(row['stored']['requests'] for row in report['rows'])} requests in {len(report['rows'])} rows",
        ),
        Check("events = settled tokens", stored == settled, f"{stored} = {settled}"),
        Check("journalled = settled tokens", settled == _tokens(seen, "meterhouse_tokens_total"), f"{settled}"),
        Check("told = event, by request", not differ, f"{len(crowd.told)} compared, {len(differ)} differ"),
        Check(
            "Σ compute of requests = busy",
            abs(spent_s / busy_s - 1) < COST_ERROR_MAX,
            f"{spent_s:.3f} s = {busy_s:.3f} s",
        ),
    ]


def _tokens(seen: dict[str, float], name: str) -> Usage:
    return Usage(*(int(seen.get(f"{name}.{kind}", 0)) for kind in ("prompt", "cached", "completion")))


def given_back(subject: Subject, crowd: Crowd, before: tuple[Handles, Handles]) -> list[Check]:
    """Adapters, their slots, descriptors and threads. An adapter with a user left would never be unloaded."""
    after = subject.handles()
    checks = [
        Check(f"{which}: {what}", now <= then + POOLED, f"{then} → {now}")
        for which, old, new in zip(("engine", "gateway"), before, after, strict=True)
        for what, then, now in (
            ("descriptors", old.descriptors, new.descriptors),
            ("threads", old.threads, new.threads),
        )
    ]
    try:
        for tenant, names in TENANTS.items():
            for name in names:
                subject.unload(tenant, name)
        stuck = "none"
    except CallFailed as error:
        stuck = str(error)
    asyncio.run(crowd.ask_plainly())  # the engine tells of its adapters with its steps
    seen = subject.idle()
    names = ("meterhouse_adapters_loaded", "meterhouse_adapters_resident")
    return [
        *checks,
        Check("adapters with users left", stuck == "none", stuck),
        *(Check(name, seen[name] == 0, f"{seen[name]:g}") for name in names),
    ]


def flat(samples: Sequence[Sample]) -> list[Check]:
    """Resident memory after the warm-up."""
    engine = Course([sample.engine.rss_bytes for sample in samples])
    gateway = Course([sample.gateway.rss_bytes for sample in samples])
    return [
        Check(f"engine's memory within ±{ENGINE_FLAT:.0%}", engine.spread <= ENGINE_FLAT, _told(engine)),
        Check(f"gateway's growth ≤ {GATEWAY_GROWTH_MAX:.0%}", gateway.growth <= GATEWAY_GROWTH_MAX, _told(gateway)),
    ]


def _told(course: Course) -> str:
    low, middle, high = (round(value / 1e6, 1) for value in (min(course.values), course.median, max(course.values)))
    return f"{low} / {middle} / {high} MB (min, median, max), {course.spread:.2%} off, growth {course.growth:+.2%}"


# --- the program ---------------------------------------------------------------------------------


def soak(
    subject: Subject,
    mixture: Callable[[str], Mixture],
    adapters: dict[str, Path],
    *,
    warmup: int,
    requests: int,
    concurrency: int = CONCURRENCY,
    seed: int = 0,
) -> tuple[Crowd, list[Check]]:
    """The whole of it; `mixture` makes the requests for the base model of a name. Crowd's samples are of all phases."""
    since_s = int(time.time())
    keys = subject.prepare(adapters)
    base = _base_model(subject.url, keys[POOR])
    crowd = Crowd(subject, mixture(base), keys, adapters, concurrency=concurrency, seed=seed)
    asyncio.run(crowd.ask(warmup))
    subject.idle()
    before = subject.handles()
    asyncio.run(crowd.ask(requests))
    wrong = Check("ends that are none", not crowd.wrong, "; ".join(crowd.wrong[:3]) or "none")
    checks = [wrong, *accounts(subject, crowd, since_s), *given_back(subject, crowd, before)]
    return crowd, [*flat([one for one in crowd.samples if one.requests > warmup]), *checks]


def _base_model(url: str, key: str) -> str:
    """The only model of a tenant without adapters."""
    models = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=30).json()["data"]
    return str(models[0]["id"])


def make_adapters(model: Path, folder: Path) -> dict[str, Path]:
    """Two of the examples and random ones, by name. Small: they come and go, and memory is to be flat to a percent."""
    examples = Path(__file__).resolve().parents[1] / "examples" / "adapters"
    config = ModelConfig.from_folder(model)
    made = {"red": examples / "pirate", "green": examples / "haiku"}
    for name, (rank, projections) in RANDOM_ADAPTERS.items():
        made[name] = loras.write(folder / name, config, rank=rank, seed=rank, projections=projections)
    return made


def show(crowd: Crowd, checks: Sequence[Check], warmup: int, wall_s: float) -> None:
    console = Console(width=200, soft_wrap=True, highlight=False, markup=False)
    ends = ", ".join(f"{count} {how}" for how, count in crowd.ends.most_common())
    console.print(f"{crowd.done} requests, {crowd.swaps} changes of adapters in {wall_s:.0f} s: {ends}")
    table = Table("requests", "engine RSS, MB", "anonymous", "gateway RSS, MB", "anonymous", box=None)
    for sample in crowd.samples[:: max(1, len(crowd.samples) // 12)]:
        sizes = (*msgspec.structs.astuple(sample.engine), *msgspec.structs.astuple(sample.gateway))
        mark = " (warm-up)" if sample.requests <= warmup else ""
        table.add_row(f"{sample.requests}{mark}", *(f"{size / 1e6:.1f}" for size in sizes))
    console.print(table)
    for check in checks:
        console.print(f"{'ok    ' if check.holds else 'BROKEN'} {check.name}: {check.seen}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="what `meterhouse serve --model` takes")
    parser.add_argument("--flag", action="append", default=[], help="another flag of `meterhouse serve`, --flag=--x=y")
    parser.add_argument("--warmup", type=int, default=500, help="requests before memory is watched")
    parser.add_argument("--requests", type=int, default=2000, help="requests while it is watched")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="keep what the server prints in this file")
    parser.add_argument("--out", type=Path, help="append each sample of memory to this file, a JSON object a line")
    return parser.parse_args()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is ended too
    asked = parse()
    cache = default_cache_dir()
    model = resolve_model(asked.model, cache)
    tokenizer = Tokenizer(model)

    def mixture(base: str) -> Mixture:
        limits: dict[str, Any] = {"prompt_max": PROMPT_MAX, "context": CONTEXT, "cut_s": CUT_S}
        return Mixture(tokenizer, model=base, adapters=TENANTS, poor=POOR, seed=asked.seed, **limits)

    with tempfile.TemporaryDirectory(prefix="meterhouse-soak-") as folder:
        adapters = make_adapters(model, Path(folder))
        began_s = time.monotonic()
        try:
            with running([*FLAGS, *asked.flag], asked.log or Path(folder) / "log", model=asked.model) as ours:
                subject = Subject(ours.url, ours.admin_key, ours.pid)
                crowd, checks = soak(
                    subject,
                    mixture,
                    adapters,
                    warmup=asked.warmup,
                    requests=asked.requests,
                    concurrency=asked.concurrency,
                    seed=asked.seed,
                )
                subject.close()
        except Absent as error:
            say(f"the server does not come up: {error}")
            return 1
    if asked.out is not None:
        with asked.out.open("ab") as file:
            file.writelines(msgspec.json.encode(sample) + b"\n" for sample in crowd.samples)
    show(crowd, checks, asked.warmup, time.monotonic() - began_s)
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
