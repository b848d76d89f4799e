"""The loop around the core when there is nothing to do: it sleeps, wakes in time, and looks whether all is well."""

import time

import pytest

from engine import child
from engine.blocks import IntegrityError
from engine.core import EngineCore
from engine.types import Request, SamplingParams
from engine.wire import ToParent, Waiting
from tests.fixtures.scripted import ScriptedRunner, make_core


class Quiet:
    """A pipe on which nothing comes, but a message at the `heard_at`-th time that somebody waits."""

    def __init__(self, heard_at: int = 0) -> None:
        self.waits: list[float | None] = []
        self.sent: list[ToParent] = []
        self._heard_at = heard_at

    def wait(self, timeout_s: float | None) -> bool:
        self.waits.append(timeout_s)
        return len(self.waits) == self._heard_at

    def send(self, message: ToParent) -> None:
        self.sent.append(message)


def idle_core() -> tuple[EngineCore, list[int]]:
    """One with a pool of three slices, and the number of slices that were looked at."""
    core = make_core(ScriptedRunner(num_blocks=10_000))
    looked = [0]
    slices = core.checked_slices

    def counted():
        for _ in slices():
            looked[0] += 1
            yield

    core.checked_slices = counted
    return core, looked


def rest(core: EngineCore, checked_s: float = 0.0, heard_at: int = 0) -> tuple[float, Quiet]:
    pipe = Quiet(heard_at)
    return child._rest(pipe, core, checked_s), pipe


def test_after_a_quiet_while_it_checks_itself_once_and_sleeps_on() -> None:
    core, looked = idle_core()
    checked_s, pipe = rest(core)
    assert checked_s == pytest.approx(time.monotonic(), abs=5)
    assert looked == [3]
    assert pipe.waits == [child.IDLE_CHECK_S, 0, 0, 0, None]
    assert pipe.sent == []


def test_it_says_that_it_is_there_while_a_request_waits_for_what_it_needs() -> None:
    core, _ = idle_core()
    core.add(Request(id="r", prompt=[1], sampling=SamplingParams()))
    _, pipe = rest(core)
    assert pipe.sent == [Waiting()]
    assert pipe.waits[-1] == child.BEAT_S


def test_it_does_not_check_itself_again_and_again() -> None:
    core, _ = idle_core()
    _, pipe = rest(core, checked_s=time.monotonic())
    assert child.IDLE_CHECK_S < pipe.waits[0] <= child.CHECK_PAUSE_S


@pytest.mark.parametrize(("heard_at", "slices"), [(1, 0), (2, 1), (3, 2)])
def test_whoever_comes_waits_for_one_slice_at_most(heard_at: int, slices: int) -> None:
    core, looked = idle_core()
    checked_s, pipe = rest(core, heard_at=heard_at)
    assert (checked_s, looked, len(pipe.waits)) == (0.0, [slices], heard_at)


def test_it_wakes_for_a_deadline_and_leaves_the_check_for_later() -> None:
    core, looked = idle_core()
    core.add(Request(id="r", prompt=[1], sampling=SamplingParams(), queue_timeout_ms=200))
    _, pipe = rest(core)
    [wait_s] = pipe.waits
    assert 0 <= wait_s <= 0.2
    assert looked == [0]
    core.add(Request(id="s", prompt=[1], sampling=SamplingParams(), queue_timeout_ms=3_600_000))
    core.abort("r")
    core.step()
    core._deadlines = [entry for entry in core._deadlines if entry[1] == "s"]
    _, pipe = rest(core)
    assert pipe.waits[0] == child.IDLE_CHECK_S
    assert pipe.waits[-1] == child.BEAT_S
    core._deadlines = [(core._deadlines[0][0] - 3_595_000_000, "s")]
    _, pipe = rest(core)
    assert 0 < pipe.waits[-1] <= 5


def test_a_contradiction_is_not_survived() -> None:
    core, _ = idle_core()
    core.scheduler.pool.allocate(1)
    with pytest.raises(IntegrityError):
        rest(core)
