"""The small parts by themselves: limits on a clock of the test's own, the error map, answers, ids."""

from __future__ import annotations

import asyncio
import uuid

import msgspec
import pytest
from litestar.exceptions import HTTPException

from billing import errors as billing
from billing.money import MoneyError
from engine import types as engine
from gateway.errors import ApiError, RateLimited, api_error, envelope
from gateway.ids import uuid7
from gateway.limits import Limits
from gateway.sse import Answer
from metering import spool


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_bucket_refills_evenly_and_a_refund_is_whole() -> None:
    clock = Clock()
    limits = Limits(clock)
    tenant = {"requests_per_minute": 6, "tokens_per_minute": 600}
    leases = [limits.enter("t", tenant) for _ in range(6)]
    with pytest.raises(RateLimited) as caught:
        limits.enter("t", tenant)
    assert caught.value.headers["retry-after"] == "10"
    assert limits.open == 6
    leases[0].refund()
    leases[0].refund()  # again: nothing
    again = limits.enter("t", tenant)
    again.take_tokens(500, 50)
    with pytest.raises(RateLimited) as caught:
        leases[1].take_tokens(100, 0)
    assert caught.value.type == "tokens"
    assert leases[1].closed  # what was refused keeps no place
    again.close(20)  # 530 come back
    leases[2].take_tokens(570, 0)
    clock.now_s += 10
    limits.enter("t", tenant).close(0)
    for lease in leases:
        lease.close(0)
    assert limits.open == 0


def test_more_tokens_than_taken_are_owed() -> None:
    clock = Clock()
    limits = Limits(clock)
    tenant = {"tokens_per_minute": 60}
    lease = limits.enter("t", tenant)
    lease.take_tokens(10, 0)
    lease.close(120)
    waiting = limits.enter("t", tenant)
    with pytest.raises(RateLimited) as caught:
        waiting.take_tokens(1, 0)
    assert caught.value.headers["retry-after"] == "61"
    clock.now_s += 62
    limits.enter("t", tenant).take_tokens(1, 0)


def test_changed_limit_keeps_what_was_used() -> None:
    limits = Limits(Clock())
    for _ in range(3):
        limits.enter("t", {"requests_per_minute": 3})
    with pytest.raises(RateLimited):
        limits.enter("t", {"requests_per_minute": 3})
    limits.enter("t", {"requests_per_minute": 4})
    with pytest.raises(RateLimited):
        limits.enter("t", {"requests_per_minute": 4})
    limits.enter("t", {})


ERRORS: list[tuple[Exception, int, str | None]] = [
    (billing.Invalid([("name", "too long"), ("id", "taken")]), 400, "invalid_value"),
    (billing.NotFound("tenant", "x"), 404, "not_found"),
    (billing.UnknownModel("x"), 404, "model_not_found"),
    (billing.Conflict("exists"), 409, "conflict"),
    (billing.IdempotencyConflict("other"), 409, "idempotency_conflict"),
    (billing.PeriodNotClosed("late"), 409, "period_not_closed"),
    (billing.InsufficientCredits(5, 3), 402, "insufficient_quota"),
    (billing.NoPrice("none"), 503, "no_price"),
    (billing.StripeNotConfigured("no key"), 409, "stripe_not_configured"),
    (billing.ExportError("declined"), 502, "payment_provider_error"),
    (billing.LedgerUnavailable("sqlite:////secret/ledger"), 503, "no_ledger"),
    (MoneyError("'x' is not a decimal number"), 400, "invalid_value"),
    (spool.SpoolFull("/secret/spool"), 503, "no_spool"),
    (engine.EngineBusy("full"), 503, "overloaded"),
    (engine.EngineUnavailable("pid 7 died"), 503, "engine_unavailable"),
    (engine.PromptTooLong("long"), 400, "context_length_exceeded"),
    (engine.AdapterRejected("rank 512"), 400, "adapter_rejected"),
    (engine.GrammarRejected("unclosed group"), 400, "grammar_rejected"),
    (engine.AdapterUnknown("x"), 503, "adapter_unavailable"),
    (engine.AdapterLost("its files are gone"), 503, "adapter_unavailable"),
    (engine.EngineError("/secret"), 500, "internal_error"),
    (msgspec.ValidationError("Expected `int`, got `str` - at `$.a.b`"), 400, "invalid_type"),
    (HTTPException(status_code=404, detail="/secret"), 404, "not_found"),
    (HTTPException(status_code=418, detail="/secret"), 400, None),
    (HTTPException(status_code=500, detail="/secret"), 500, "internal_error"),
    (OSError("/secret/path"), 500, "internal_error"),
    (RuntimeError("SELECT secret"), 500, "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "code"), ERRORS, ids=lambda value: type(value).__name__)
def test_map_of_errors(error: Exception, status: int, code: str | None) -> None:
    answer = api_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert "secret" not in str(envelope(answer))
    assert envelope(answer).error.type


def test_every_domain_error_has_a_place_of_its_own() -> None:
    def leaves(kind: type[Exception]) -> list[type[Exception]]:
        below = [leaf for child in kind.__subclasses__() for leaf in leaves(child)]
        return below or [kind]

    for kind in (
        leaf for root in (billing.BillingError, spool.SpoolError, engine.EngineError) for leaf in leaves(root)
    ):
        error = kind.__new__(kind)
        error.__dict__.update(field="f", id="i", faults=[("f", "r")])
        assert isinstance(api_error(error), ApiError)


def test_answer_has_many_readers_each_at_its_own_place() -> None:
    async def run() -> None:
        answer = Answer(stream=True, keep=True)
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(answer.more(0, never, None))
        await asyncio.sleep(0)
        assert not waiting.done()
        answer.say([b"a", b"b"])
        await waiting
        assert (answer.since(0), answer.since(1), answer.said) == (b"ab", b"b", 2)
        await answer.more(2, never, 0.01)  # silence: returns when the time is over
        gone = asyncio.create_task(asyncio.sleep(0.01))
        await answer.more(2, gone, None)  # the reader left
        answer.end([b"c"])
        assert (answer.since(2), answer.body(), answer.done) == (b"c", b"abc", True)

    asyncio.run(run())


def test_answer_for_one_reader_keeps_nothing_that_was_read() -> None:
    answer = Answer(stream=True, keep=False)
    answer.say([b"a", b"b"])
    assert (answer.since(0), answer.said, answer.body()) == (b"ab", 0, b"")


def test_uuid7_sorts_by_time_and_says_its_version() -> None:
    ids = [uuid7(1_700_000_000_000_000 + step) for step in range(0, 5000, 7)]
    assert ids == sorted(ids)
    first = uuid.UUID(ids[0])
    assert (first.version, first.variant) == (7, uuid.RFC_4122)
    assert first.int >> 80 == 1_700_000_000_000
    assert uuid7(5, b"\xff" * 8) == uuid7(5, b"\xff" * 8)
