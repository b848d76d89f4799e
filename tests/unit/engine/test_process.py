"""The supervised child process, over a scripted runner: its life, its death and what the streams see of it."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

from engine.adapters import CONFIG_FILE, WEIGHTS_FILE
from engine.process import EngineProcess
from engine.types import (
    AdapterRef,
    AdapterRejected,
    AdapterUnknown,
    EngineBusy,
    EngineConfig,
    EngineError,
    EngineUnavailable,
    Finish,
    PromptTooLong,
    Request,
    SamplingParams,
    StepOutput,
    TokenCounts,
    Update,
)

ROOT = Path(__file__).parents[3]
BUILDER = "tests.fixtures.scripted:build"

Make = Callable[..., EngineProcess]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes engines over a scripted child; all are stopped at the end."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the child imports this repository's tests
    engines: list[EngineProcess] = []

    def _make(hang_timeout_s: float = 60.0, config: dict | None = None, **options: object) -> EngineProcess:
        engine = EngineProcess(
            EngineConfig(model=json.dumps(options), **(config or {})), hang_timeout_s=hang_timeout_s, builder=BUILDER
        )
        engines.append(engine)
        return engine

    yield _make
    for engine in engines:
        await engine.stop()


def request(id_: str = "r", max_tokens: int = 4, **fields: object) -> Request:
    return Request(
        id=id_, prompt=list(b"some prompt"), sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True), **fields
    )


async def read(stream: AsyncIterator[Update]) -> list[Update]:
    return [update async for update in stream]


async def read_until_death(stream: AsyncIterator[Update]) -> list[Update]:
    ups = []
    try:
        async for update in stream:
            ups.append(update)
    except EngineUnavailable:
        return ups
    pytest.fail("the stream did not fail")


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # what it waits for has no event
            await asyncio.sleep(0.01)


def write_adapter(folder: Path, content: bytes = b"w") -> AdapterRef:
    folder.mkdir(exist_ok=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (folder / name).write_bytes(content)
    return AdapterRef(id=folder.name, name="pirate", path=str(folder))


def test_importing_it_leaves_torch_out() -> None:
    code = "import engine.process, engine.fake, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


async def test_a_stream_comes_with_its_counts_and_the_queue_time(make: Make) -> None:
    engine = make()
    assert not engine.ready
    with pytest.raises(EngineUnavailable):
        engine.submit(request())
    await engine.start()
    ups = await read(engine.submit(request()))
    assert [up.counts.completion for up in ups] == [1, 2, 3, 4]
    assert [up.finished for up in ups] == [False, False, False, True]
    assert 0 < ups[-1].queue_us < 10_000_000
    assert engine.stats.steps_total == 4
    assert engine.info.name == "scripted"


async def test_a_gateway_with_thousands_of_connections_can_start_it(make: Make) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2048), hard), hard))
    with contextlib.ExitStack() as open_files:
        open_files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            open_files.callback(os.close, os.dup(0))
        engine = make()
        await engine.start()
        assert len(await read(engine.submit(request()))) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads the environment of another process")
async def test_the_child_is_not_given_the_gateways_secrets(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "STRIPE_API_KEY": "sk_test_1",
        "METERHOUSE_ADMIN_KEY": "a",
        "METERHOUSE_LEDGER_URL": "b",
        "PGPASSWORD": "c",
    }
    for name, value in {**secrets, "TRITON_CACHE_DIR": "/t", "OMP_WAIT_POLICY": "active"}.items():
        monkeypatch.setenv(name, value)
    engine = make()
    await engine.start()
    entries = Path(f"/proc/{engine.pid}/environ").read_bytes().decode().split("\0")  # noqa: ASYNC240  # no disk
    found = dict(entry.split("=", 1) for entry in entries if entry)
    assert not set(secrets) & set(found)
    assert not [name for name in found if name.startswith(("METERHOUSE_", "STRIPE_"))]
    kept = {name: found[name] for name in ("TRITON_CACHE_DIR", "OMP_WAIT_POLICY", "PATH", "PYTHONPATH")}
    assert kept == {name: os.environ[name] for name in kept}


async def test_the_child_logs_as_it_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    engine = EngineProcess(EngineConfig(model='{"nonsense": 1}'), builder=BUILDER, log_format="json")
    with pytest.raises(EngineUnavailable):
        await engine.start()
    await engine.stop()
    (line,) = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (line["logger"], line["level"], line["event"]) == ("engine.child", "error", "the engine cannot start")
    assert "TypeError" in line["exception"]


async def test_what_can_never_be_served_is_refused_at_the_door(make: Make) -> None:
    engine = make(num_blocks=8, config={"max_num_seqs": 1, "max_waiting": 1}, step_s=0.02)
    await engine.start()
    with pytest.raises(PromptTooLong):
        engine.submit(request(max_tokens=500))
    with pytest.raises(AdapterUnknown):
        engine.submit(request(adapter=AdapterRef(id="none", name="n", path="p")))
    first = engine.submit(request("a"))
    with pytest.raises(EngineError, match="open already"):
        engine.submit(request("a"))
    second = engine.submit(request("b"))
    with pytest.raises(EngineBusy):
        engine.submit(request("c"))
    await asyncio.gather(read(first), read(second))
    assert (await read(engine.submit(request("c"))))[-1].finish is Finish.LENGTH


async def test_a_killed_child_fails_its_streams_and_comes_back(make: Make, tmp_path: Path) -> None:
    engine = make(step_s=0.01)
    await engine.start()
    info = await engine.load_adapter(write_adapter(tmp_path / "a"))
    stream = engine.submit(request(max_tokens=200))
    first = await anext(stream)
    assert first.counts.completion == 1
    pid = engine.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await read(stream)
    assert not engine.ready
    with pytest.raises(EngineUnavailable):
        engine.submit(request("s"))
    with pytest.raises(EngineUnavailable):
        await engine.load_adapter(write_adapter(tmp_path / "b"))
    await until(lambda: engine.ready)
    assert (engine.restarts, engine.pid != pid) == (1, True)
    assert engine.stats.steps_total == 0
    ref = AdapterRef(id=info.id, name="pirate", path=str(tmp_path / "a"))
    assert (await read(engine.submit(request("t", adapter=ref))))[-1].finish is Finish.LENGTH


async def test_an_adapter_whose_content_changed_does_not_serve_after_a_restart(make: Make, tmp_path: Path) -> None:
    engine = make()
    await engine.start()
    kept, changed = write_adapter(tmp_path / "kept"), write_adapter(tmp_path / "changed")
    await engine.load_adapter(kept)
    await engine.load_adapter(changed)
    write_adapter(tmp_path / "changed", b"other weights")
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.restarts == 1)
    other = asyncio.create_task(read(engine.submit(request("other", adapter=kept))))
    [refused] = await read(engine.submit(request(adapter=changed)))
    assert (refused.finish, refused.counts) == (Finish.ERROR, TokenCounts())
    assert refused.error
    assert "content has changed" in refused.error
    assert (await other)[-1].finish is Finish.LENGTH
    assert (await read(engine.submit(request(adapter=kept))))[-1].finish is Finish.LENGTH


async def test_files_are_read_while_streams_run(make: Make, tmp_path: Path) -> None:
    """The scripted runner opens a pipe, which nobody writes to as long as this test does not."""
    engine = make(step_s=0.002)
    await engine.start()
    slow = write_adapter(tmp_path / "slow")
    weights = tmp_path / "slow" / WEIGHTS_FILE
    weights.unlink()
    os.mkfifo(weights)
    load = asyncio.create_task(engine.load_adapter(slow))
    assert (await read(engine.submit(request(max_tokens=50))))[-1].finish is Finish.LENGTH
    assert not load.done()
    unload = asyncio.create_task(engine.unload_adapter(slow.id))  # whoever asked for it has gone away
    load.cancel()
    await asyncio.sleep(0)
    await asyncio.to_thread(weights.write_bytes, b"w")
    async with asyncio.timeout(20):
        await unload
    with pytest.raises(AdapterUnknown):
        engine.submit(request(adapter=slow))
    assert (await read(engine.submit(request("after"))))[-1].finish is Finish.LENGTH
    assert (engine.stats.adapters_loaded, engine.stats.adapter_reads_total) == (0, 1)


async def test_a_child_that_dies_at_a_step_loses_only_that_step(make: Make) -> None:
    engine = make(die_at=3)
    await engine.start()
    ups = await read_until_death(engine.submit(request(max_tokens=10)))
    assert [up.counts.completion for up in ups] == [1, 2]


@pytest.mark.parametrize("turns", range(6))
async def test_it_can_be_stopped_at_any_moment_of_a_childs_death(make: Make, turns: int) -> None:
    engine = make()
    await engine.start()
    assert engine._link is not None
    assert engine._link.process is not None
    os.kill(engine.pid, signal.SIGKILL)
    await engine._link.process.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await engine.stop()
    assert engine.pid is None


async def test_a_hung_child_is_killed(make: Make, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    engine = make(hang_timeout_s=0.4, hang_at=2, flag=str(flag))
    await engine.start()
    with pytest.raises(EngineUnavailable):
        await read(engine.submit(request()))
    await until(lambda: engine.ready)
    assert (await read(engine.submit(request())))[-1].finish is Finish.LENGTH


async def test_an_idle_or_paused_child_is_not_taken_for_hung(make: Make) -> None:
    engine = make(hang_timeout_s=0.2)
    await engine.start()
    stream = engine.submit(request(token_ceiling=2))
    assert (await anext(stream)).counts.completion == 1
    assert (await anext(stream)).paused
    engine.set_ceiling("r", 2, final=False)  # an answer that allows nothing leaves it paused
    await asyncio.sleep(0.6)
    engine.set_ceiling("r", 2, final=True)
    [last] = await read(stream)
    assert (last.finish, last.counts.completion) == (Finish.QUOTA, 2)
    await asyncio.sleep(0.4)
    assert (engine.ready, engine.restarts) == (True, 0)


async def test_a_child_that_cannot_start_says_why(make: Make) -> None:
    engine = make(refuse="there is no model in this folder")
    with pytest.raises(EngineUnavailable, match="there is no model in this folder"):
        await engine.start()
    assert not engine.ready
    broken = EngineProcess(EngineConfig(model="{}"), builder="tests.fixtures.scripted:no_such_function")
    with pytest.raises(EngineUnavailable, match="no_such_function"):
        await broken.start()


async def test_a_failed_restart_is_tried_again(make: Make, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    engine = make(refuse="not yet", flag=str(flag))
    await engine.start()
    flag.touch()
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.restarts == 1)
    assert not flag.exists()
    assert (await read(engine.submit(request())))[-1].finish is Finish.LENGTH


async def test_counts_are_shown_before_they_are_delivered(make: Make) -> None:
    engine = make()
    await engine.start()
    shown: list[StepOutput] = []
    engine.on_step = shown.append
    async for update in engine.submit(request()):
        assert update in [known for output in shown for known in output.updates]
    assert [output.step for output in shown] == [1, 2, 3, 4]


async def test_a_step_that_is_not_recorded_is_not_delivered(make: Make) -> None:
    engine = make(step_s=0.005)
    await engine.start()
    seen: list[Update] = []

    def refuse_third(output: StepOutput) -> None:
        seen.extend(output.updates)
        if output.step == 3:
            raise OSError("disk full")

    engine.on_step = refuse_third
    ups = await read_until_death(engine.submit(request(max_tokens=100)))
    assert [up.counts.completion for up in ups] == [1, 2]
    await until(lambda: engine.stats.running == 0)
    assert [up.counts.completion for up in seen] == [1, 2, 3]  # what the child did until the abort is nobody's
    assert (await read(engine.submit(request("s"))))[-1].finish is Finish.LENGTH
    assert engine.restarts == 0


async def test_an_unread_stream_blocks_no_other(make: Make) -> None:
    engine = make()
    await engine.start()
    unread = engine.submit(request("unread", 60))
    assert (await read(engine.submit(request("other", 80))))[-1].finish is Finish.LENGTH
    assert [up.counts.completion for up in await read(unread)] == list(range(1, 61))


async def test_stopping_fails_what_is_open_and_leaves_no_process(make: Make) -> None:
    engine = make(step_s=0.01)
    await engine.start()
    stream = engine.submit(request(max_tokens=200))
    await anext(stream)
    pid = engine.pid
    await engine.stop()
    with pytest.raises(EngineUnavailable):
        await read(stream)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert engine.pid is None


async def test_unloading_waits_for_the_last_request_and_survives_a_death(make: Make, tmp_path: Path) -> None:
    engine = make(step_s=0.01)
    await engine.start()
    ref = write_adapter(tmp_path / "a")
    await engine.load_adapter(ref)
    stream = engine.submit(request(max_tokens=200, adapter=ref))
    await anext(stream)
    unload = asyncio.create_task(engine.unload_adapter(ref.id))
    await asyncio.sleep(0.05)
    assert not unload.done()
    with pytest.raises(AdapterUnknown):
        engine.submit(request("late", adapter=ref))
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        await unload
    await until(lambda: engine.ready)
    with pytest.raises(AdapterUnknown):
        engine.submit(request("later", adapter=ref))
    with pytest.raises(AdapterRejected):
        await engine.load_adapter(AdapterRef(id="x", name="n", path=str(tmp_path / "nothing")))


async def test_a_request_that_cannot_be_sent_leaves_nothing_behind(make: Make) -> None:
    engine = make()
    await engine.start()
    with pytest.raises(UnicodeEncodeError):
        engine.submit(request(cache_salt="\ud800"))
    assert (await read(engine.submit(request())))[-1].finish is Finish.LENGTH


def test_it_lives_on_the_servers_event_loop_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def live() -> tuple[int, Finish | None]:
        engine = EngineProcess(EngineConfig(model='{"step_s": 0.01}'), builder=BUILDER)
        await engine.start()
        stream = engine.submit(request(max_tokens=200))
        await anext(stream)
        os.kill(engine.pid or 0, signal.SIGKILL)
        await read_until_death(stream)
        await until(lambda: engine.ready)
        last = (await read(engine.submit(request("s"))))[-1]
        await engine.stop()
        return engine.restarts, last.finish

    assert uvloop.run(live()) == (1, Finish.LENGTH)


PARENT = """
import asyncio, json, sys
from engine.process import EngineProcess
from engine.types import EngineConfig

async def main():
    engine = EngineProcess(EngineConfig(model="{}"), builder="tests.fixtures.scripted:build")
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel kills it with its parent on Linux only")
def test_the_child_dies_with_its_parent_but_not_of_the_groups_signals(make: Make) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert os.getpgid(pid) != os.getpgid(parent.pid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        time.sleep(0.2)
        os.kill(pid, 0)
        parent.kill()
        parent.wait()
        for _ in range(500):
            if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                return
            time.sleep(0.01)
    pytest.fail("the child outlived its parent")


async def test_a_child_that_contradicts_itself_ends_and_is_started_again(make: Make, tmp_path: Path) -> None:
    flag = tmp_path / "corrupt"
    flag.touch()
    engine = make(flag=str(flag), corrupt=True)
    await engine.start()
    await until(lambda: engine.restarts == 1)
    assert (await read(engine.submit(request())))[-1].finish is Finish.LENGTH


async def test_the_engines_own_limit_ends_what_waits_too_long(make: Make) -> None:
    engine = make(step_s=0.01, config={"max_num_seqs": 1, "queue_timeout_s": 0.05})
    await engine.start()
    running = engine.submit(request("a", max_tokens=100))
    await anext(running)
    [last] = await read(engine.submit(request("b")))
    assert (last.counts, last.finish) == (TokenCounts(), Finish.EXPIRED)
    assert last.queue_us >= 50_000
    engine.abort("a")
    await read(running)


async def test_one_tenant_cannot_fill_the_queue(make: Make) -> None:
    engine = make(step_s=0.01, config={"max_num_seqs": 1, "max_waiting": 8})
    await engine.start()
    running = engine.submit(request("a", max_tokens=100, tenant="t"))
    await anext(running)
    streams = [engine.submit(request(f"t{number}", tenant="t")) for number in range(7)]
    with pytest.raises(EngineBusy):
        engine.submit(request("t7", tenant="t"))
    streams.append(engine.submit(request("u", tenant="u")))
    with pytest.raises(EngineBusy):
        engine.submit(request("v", tenant="v"))
    engine.abort("a")
    ends = await asyncio.gather(*map(read, [running, *streams]))
    assert all(ups[-1].finish in (Finish.ABORT, Finish.LENGTH) for ups in ends)
