"""A thousand streams at once on money for a tenth of what they want: billed to the token, on one gateway and on two."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from billing.leases import LeaseTable
from billing.money import cost, format_amount, parse_price
from billing.service import Billing
from billing.store import EventStore
from engine.fake import FakeEngine
from tests.fixtures.member import MemberProcess
from tests.fixtures.server import PRICE, ByteTokenizer, RunningGateway

COMPLETION = parse_price(PRICE["completion"])
BALANCE_TOKENS = 10_000
WANTED = 100  # tokens of each stream: ten times the balance, all together
PROMPT = "abcd"


class Answer(NamedTuple):
    """What a client read; `whole`: to the end. `tokens`: characters of text, a token each."""

    status: int
    tokens: int
    whole: bool
    body: str


async def ask(url: str, key: str, number: int) -> Answer:
    """One stream over a socket of its own."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": PROMPT, "max_tokens": WANTED, "ignore_eos": True, "stream": True, "user": str(number)})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    received = b""
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((head + body).encode())
        while chunk := await reader.read(1 << 16):
            received += chunk
        writer.close()
    except OSError:  # the gateway was killed
        pass
    text = received.decode(errors="replace")
    status = int(text.split(" ", 2)[1]) if text.startswith("HTTP/1.1 ") else 0
    frames = [line[6:] for line in text.splitlines() if line.startswith("data: {") and line.endswith("}")]
    tokens = sum(len(choice.get("text", "")) for frame in frames for choice in json.loads(frame).get("choices", ()))
    whole = "data: [DONE]" in text if status == 200 else status != 0
    return Answer(status, tokens, whole, text.partition("\r\n\r\n")[2])


async def flood(urls: Sequence[str], key: str, count: int, then: Callable[[], None] = lambda: None) -> list[Answer]:
    """So many streams at once, in turn over the gateways; `then` is done while they run."""
    asking = [asyncio.create_task(ask(urls[number % len(urls)], key, number)) for number in range(count)]
    await asyncio.to_thread(then)
    return await asyncio.gather(*asking)


def refusals_are_402_in_the_envelope(answers: Sequence[Answer]) -> None:
    assert {answer.status for answer in answers} <= {200, 402, 0}
    for answer in answers:
        if answer.status == 402:
            error = json.loads(answer.body[answer.body.index("{") : answer.body.rindex("}") + 1])["error"]
            assert (error["type"], error["code"], error["param"]) == ("insufficient_quota", "insufficient_quota", None)
            assert error["message"] == "The balance does not cover this request."


def test_a_thousand_streams_on_one_gateway(make_gateway: Callable[..., RunningGateway]) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.001, max_num_seqs=256))
    granted = cost(BALANCE_TOKENS, COMPLETION)
    key = gateway.tenant(credit=format_amount(granted))
    answers = asyncio.run(flood([gateway.url], key, 1000))
    gateway.idle(30)
    refusals_are_402_in_the_envelope(answers)
    served = [answer for answer in answers if answer.status == 200]
    events = gateway.events()
    assert len(served) + sum(answer.status == 402 for answer in answers) == 1000
    assert (len(events), sum(event.completion_tokens for event in events)) == (
        len(served),
        sum(answer.tokens for answer in served),
    )
    balance = gateway.billing.balance("acme")
    assert balance.charged_femto <= granted
    assert 0 <= balance.available_femto < COMPLETION  # not one token more could be sold
    assert balance.held_femto == 0


class Cluster:
    """Two gateway processes on one PostgreSQL, and the books beside them."""

    def __init__(self, folder: Path, ledger_url: str, step_s: float) -> None:
        self.folder, self.ledger_url, self.step_s = folder, ledger_url, step_s
        self.members = [self.start(id) for id in ("g1", "g2")]
        self.billing = Billing(EventStore(ledger_url), base_model="fake", price_lead_us=0)
        self.billing.create_tenant(id="acme", name="Acme")
        self.billing.set_price(model="*", effective_at_us=1, currency="usd", per_million=PRICE)
        self.granted = cost(BALANCE_TOKENS, COMPLETION)
        self.billing.grant_credit("acme", format_amount(self.granted), "usd", "test")
        self.key = str(self.billing.create_key("acme", "k")[1])

    def start(self, id: str) -> MemberProcess:
        return MemberProcess(self.folder / id, self.ledger_url, id, self.step_s)

    def leased(self) -> int:
        with self.billing._store.connected() as connection:
            return sum(lease.amount for id in ("g1", "g2") for lease in LeaseTable(connection).of_gateway(id).values())

    def recorded(self) -> list[dict[str, Any]]:
        """What was charged, from the log itself."""
        with self.billing._store.connected() as connection:
            rows = connection.execute(sa.text("SELECT payload FROM events WHERE type = 'usage.rated'")).scalars()
            return [json.loads(row) for row in rows]

    def within(self, timeout_s: float, check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while not check():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def close(self) -> None:
        assert [member.stop() for member in self.members] == [0, 0]
        self.billing.refresh()
        assert self.leased() == 0


def test_a_thousand_streams_on_two_gateways(tmp_path: Path, postgres_ledger_url: str) -> None:
    cluster = Cluster(tmp_path, postgres_ledger_url, 0.001)
    urls = [member.url() for member in cluster.members]
    answers = asyncio.run(flood(urls, cluster.key, 1000))
    cluster.close()
    refusals_are_402_in_the_envelope(answers)
    charges = cluster.recorded()
    served = [answer for answer in answers if answer.status == 200]
    assert len(charges) == len(served)
    assert sum(charge["completion_tokens"] for charge in charges) == sum(answer.tokens for answer in served)
    assert {charge["gateway"] for charge in charges} == {"g1", "g2"}
    billed = sum(int(charge["amount_femto"]) for charge in charges)
    assert billed == cluster.billing.balance("acme").charged_femto <= cluster.granted
    assert cluster.granted - billed < COMPLETION  # what one left, the other could use
    cluster.billing.close()


def test_one_of_two_is_killed_in_the_middle(tmp_path: Path, postgres_ledger_url: str) -> None:
    """Nothing is lost and nothing overspent: what the dead one held is spent by nobody until it is settled."""
    cluster = Cluster(tmp_path, postgres_ledger_url, 0.005)
    urls = [member.url() for member in cluster.members]

    def kill() -> None:
        cluster.within(20, lambda: len(cluster.recorded()) > 0 or cluster.leased() > cluster.granted // 2)
        time.sleep(0.1)
        cluster.members[0].kill()
        with cluster.billing._store.exclusive():  # nobody moves any money while it is looked at
            cluster.billing.refresh()
            assert cluster.billing.balance("acme").charged_femto + cluster.leased() <= cluster.granted
        cluster.members[0] = cluster.start("g1")
        urls.append(cluster.members[0].url())

    answers = asyncio.run(flood(urls[:2], cluster.key, 400, kill))
    more = asyncio.run(flood(urls[1:], cluster.key, 200))
    cluster.close()
    refusals_are_402_in_the_envelope([*answers, *more])
    charges = cluster.recorded()
    billed = sum(int(charge["amount_femto"]) for charge in charges)
    assert billed <= cluster.granted
    assert cluster.granted - billed < COMPLETION
    ids = Counter(charge["event_id"] for charge in charges)
    assert set(ids.values()) == {1}
    seen = [answer for answer in [*answers, *more] if answer.status == 200]
    assert len(charges) >= len(seen)  # whoever got a status was let in, and so is charged, also if it was cut
    assert sum(charge["completion_tokens"] for charge in charges) >= sum(answer.tokens for answer in seen)
    cut = [answer for answer in seen if not answer.whole]
    assert cut  # it was in the middle
    cluster.billing.close()
