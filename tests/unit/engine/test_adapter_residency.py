"""Real adapters over few slots on the real runner: everybody's output is his own, whatever comes and goes.

The judge is PEFT, one adapter at a time (or the same engine with nobody else in it).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.core import EngineCore, build
from engine.scheduler import StepPlan
from engine.types import AdapterRef, AdapterRejected, AdapterUnknown, EngineConfig, Finish, Request, Update
from tests.generation import greedy, transformers_greedy
from tests.peft_adapters import make_adapters, peft_models, refer

BLOCK = 4
TOKENS = 5
CONFIGS: tuple[dict[str, Any], ...] = (  # ranks and targets differ, so that no two adapters lie alike in a batch
    {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj", "down_proj", "k_proj"]},
    {"r": 1, "lora_alpha": 4, "target_modules": ["gate_proj", "up_proj"]},
)


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Thirty-two adapters."""
    return make_adapters(tiny_model, tmp_path_factory.mktemp("adapters"), CONFIGS, count=32, strength=1.0)


@pytest.fixture(scope="module")
def expected(tiny_model: Path, folders: list[Path]) -> Callable[[Path | None, tuple[int, ...]], list[int]]:
    """What PEFT says to a prompt with the adapter of a folder, or with none."""
    reference = peft_models(tiny_model, folders)
    known: dict[tuple[Path | None, tuple[int, ...]], list[int]] = {}

    def _expected(folder: Path | None, prompt: tuple[int, ...]) -> list[int]:
        if (folder, prompt) not in known:
            if folder is None:
                with reference.disable_adapter():
                    known[folder, prompt], _ = transformers_greedy(reference, prompt, TOKENS)
            else:
                reference.set_adapter(folder.name)
                known[folder, prompt], _ = transformers_greedy(reference, prompt, TOKENS)
        return known[folder, prompt]

    return _expected


class Spy:
    """A core, and the most adapters that a step of it computed and that were resident."""

    def __init__(self, model: Path, **config: Any) -> None:
        sizes = {"block_size": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 24, "threads": 1} | config
        self.core: EngineCore = build(EngineConfig(model=str(model), dtype="float32", **sizes))
        self.together = self.resident = 0
        execute = self.core._runner.execute

        def spy(plan: StepPlan) -> Any:
            used = {entry.sequence.adapter_id for entry in plan.scheduled} - {None}
            self.together = max(self.together, len(used))
            self.resident = max(self.resident, self.core.adapters.slots.resident)
            return execute(plan)

        self.core._runner.execute = spy  # type: ignore[method-assign]

    def run(self, requests: list[Request], *, draw: random.Random | None = None) -> dict[str, list[Update]]:
        """All that is said; with `draw` they arrive a few steps apart."""
        said: dict[str, list[Update]] = {id_: [] for id_ in [*self.core.scheduler.groups, *(r.id for r in requests)]}
        waiting = list(requests)
        while True:
            while waiting and (draw is None or draw.random() < 0.5):
                self.core.add(waiting.pop(0))
            output = self.core.step()
            self.core.check_integrity()
            for update in output.updates if output is not None else ():
                said[update.request_id].append(update)
            if output is None and not self.core.wait_for_adapter() and not waiting:
                return said

    def is_at_rest(self) -> bool:
        """No block, no running sequence, no user of an adapter is left."""
        core = self.core
        left = (core.scheduler.pool.num_used, core.scheduler.num_running, core.scheduler.num_waiting)
        return left == (0, 0, 0) and not core.adapters._users


def tokens(updates: list[Update]) -> list[int]:
    return [token for update in updates for delta in update.deltas for token in delta.token_ids]


def ends(said: dict[str, list[Update]]) -> set[Finish | None]:
    return {updates[-1].finish for updates in said.values()}


def prompt_of(draw: random.Random, size: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, 512) for _ in range(size))


@pytest.mark.parametrize("cache_bytes", [0, 150_000, 1 << 30])  # nothing, a few, all of them are kept on the host
def test_ten_adapters_over_two_slots_one_of_them_corrupt(
    cache_bytes: int,
    tiny_model: Path,
    tmp_path: Path,
    folders: list[Path],
    expected: Callable[[Path | None, tuple[int, ...]], list[int]],
) -> None:
    spy = Spy(tiny_model, adapter_slots=2, adapter_cache_bytes=cache_bytes)
    corrupt = tmp_path / "corrupt"
    corrupt.mkdir()
    for file in folders[9].iterdir():
        (corrupt / file.name).write_bytes(file.read_bytes())
    mine = [corrupt, *folders[:9]]  # it is loaded first, so the first to leave the host
    refs = {folder: refer(folder, folder.name) for folder in mine}
    for ref in refs.values():
        spy.core.load_adapter(ref)
    weights = bytearray((corrupt / "adapter_model.safetensors").read_bytes())
    weights[-100] ^= 0x40
    (corrupt / "adapter_model.safetensors").write_bytes(weights)
    draw = random.Random(cache_bytes)
    prompts = {(folder, turn): prompt_of(draw, draw.choice((3, 17))) for turn in range(2) for folder in mine}
    requests = [
        greedy(f"{folder.name} {turn}", prompt, TOKENS, adapter=refs[folder])
        for (folder, turn), prompt in prompts.items()
    ]
    said = spy.run(requests)
    lost = cache_bytes < 1 << 30  # what is kept on the host is what was checked
    for (folder, turn), prompt in prompts.items():
        updates = said[f"{folder.name} {turn}"]
        if folder is corrupt and lost:
            assert updates[-1].finish is Finish.ERROR
            assert "digest differs" in (updates[-1].error or "")
            assert tokens(updates) == []
        else:
            assert updates[-1].finish is Finish.LENGTH
            assert tokens(updates) == expected(folders[9] if folder is corrupt else folder, prompt)
    assert (spy.together, spy.resident) == (2, 2)
    assert spy.is_at_rest()
    stats = spy.core.adapters
    assert len(stats) == 10
    assert stats.slots.evictions >= 7
    assert (stats.reads > 0) == lost


def test_a_corrupt_one_is_refused_at_load_and_changes_nothing(
    tiny_model: Path, tmp_path: Path, folders: list[Path], expected: Callable[..., list[int]]
) -> None:
    spy = Spy(tiny_model, adapter_slots=2)
    good = refer(folders[0], "good")
    spy.core.load_adapter(good)
    for file in folders[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:-5])
    with pytest.raises(AdapterRejected, match="not JSON"):
        spy.core.load_adapter(AdapterRef(id="bad", name="bad", path=str(tmp_path)))
    assert len(spy.core.adapters) == 1
    prompt = prompt_of(random.Random(1), 9)
    assert tokens(spy.run([greedy("r", prompt, TOKENS, adapter=good)])["r"]) == expected(folders[0], prompt)


@pytest.mark.parametrize("native", ["auto", "off"])
def test_thirty_two_adapters_over_four_slots(
    native: str,
    tiny_model: Path,
    folders: list[Path],
    expected: Callable[[Path | None, tuple[int, ...]], list[int]],
) -> None:
    spy = Spy(tiny_model, adapter_slots=4, adapter_cache_bytes=300_000, kv_cache_bytes=1 << 16, native=native)
    pinned = AdapterRef(id="pinned", name="pinned", path=str(folders[31]), pinned=True)
    refs: dict[Path | None, AdapterRef | None] = {folder: refer(folder, folder.name) for folder in folders[:31]}
    refs |= {folders[31]: pinned, None: None}
    for ref in refs.values():
        if ref is not None:
            spy.core.load_adapter(ref)
    left: list[str] = []
    spy.core._runner._adapters.watch(lambda adapter_id, adapter: None, left.append)  # type: ignore[attr-defined]
    draw = random.Random(4)
    asked = [folder for folder in refs for _ in range(2)] + [folders[0], None, folders[31]] * 5
    draw.shuffle(asked)
    prompts = [prompt_of(draw, draw.choice((2, 9, 30))) for _ in asked]
    requests = [
        greedy(str(number), prompt, TOKENS, adapter=refs[folder])
        for number, (folder, prompt) in enumerate(zip(asked, prompts, strict=True))
    ]
    said = spy.run(requests, draw=draw)
    assert ends(said) == {Finish.LENGTH}
    for number, (folder, prompt) in enumerate(zip(asked, prompts, strict=True)):
        assert tokens(said[str(number)]) == expected(folder, prompt), (number, folder)
    assert 2 <= spy.together <= spy.resident == 4  # how many meet in a step is a matter of how fast files are read
    assert spy.core.adapters.slots.evictions > 28
    assert len(left) == spy.core.adapters.slots.evictions
    assert "pinned" not in left
    assert spy.is_at_rest()
    for ref in refs.values():
        if ref is not None:
            spy.core.unload_adapter(ref.id)
    assert (len(spy.core.adapters), spy.core.adapters.slots.resident, len(spy.core.take_unloaded())) == (0, 0, 32)


def test_an_adapter_is_replaced_under_its_name_while_it_serves(
    tiny_model: Path, folders: list[Path], expected: Callable[[Path | None, tuple[int, ...]], list[int]]
) -> None:
    """The old load finishes what it has, the new one begins with nothing of the old one's cache."""
    spy = Spy(tiny_model, adapter_slots=2)
    old, new = (AdapterRef(id=f"load {n}", name="a", path=str(folders[n])) for n in range(2))
    prompt = prompt_of(random.Random(2), 22)
    spy.core.load_adapter(old)
    spy.run([greedy("warm", prompt, TOKENS, adapter=old)])
    spy.core.add(greedy("draining", prompt, TOKENS, adapter=old))
    first = spy.core.step()
    spy.core.load_adapter(new)
    spy.core.unload_adapter(old.id)
    with pytest.raises(AdapterUnknown):
        spy.core.add(greedy("late", prompt, TOKENS, adapter=old))
    assert spy.core.take_unloaded() == []
    requests = [greedy("replaced", prompt, TOKENS, adapter=new), greedy("base", prompt, TOKENS)]
    said = spy.run(requests)
    assert first is not None
    assert tokens([*first.updates, *said["draining"]]) == expected(folders[0], prompt)
    assert tokens(said["replaced"]) == expected(folders[1], prompt)
    assert tokens(said["base"]) == expected(None, prompt)
    assert len({tuple(expected(folder, prompt)) for folder in (folders[0], folders[1], None)}) == 3
    cached = {id_: updates[-1].counts.cached for id_, updates in said.items()}
    assert cached == {"draining": 20, "replaced": 0, "base": 0}
    assert spy.core.take_unloaded() == [old.id]
    assert spy.is_at_rest()


def test_a_long_prompt_under_one_adapter_warms_nothing_for_another(tiny_model: Path, folders: list[Path]) -> None:
    prompt = prompt_of(random.Random(3), 60)
    warm, cold = Spy(tiny_model, adapter_slots=1), Spy(tiny_model, adapter_slots=1)
    a, b = refer(folders[0], "a"), refer(folders[4], "b")
    for ref in (a, b):
        warm.core.load_adapter(ref)
    cold.core.load_adapter(b)
    warm.run([greedy("a", prompt, TOKENS, adapter=a)])
    after = warm.run([greedy("b", prompt, TOKENS, adapter=b)])["b"]
    alone = cold.run([greedy("b", prompt, TOKENS, adapter=b)])["b"]
    assert tokens(after) == tokens(alone)
    assert after[-1].counts == alone[-1].counts
    again = warm.run([greedy("b", prompt, TOKENS, adapter=b)])["b"]
    assert (tokens(again), again[-1].counts.cached) == (tokens(alone), 56)


def test_an_unloaded_adapter_serves_those_that_have_it_even_if_it_must_be_read_again(
    tiny_model: Path, folders: list[Path], expected: Callable[[Path | None, tuple[int, ...]], list[int]]
) -> None:
    spy = Spy(tiny_model, adapter_slots=1, adapter_cache_bytes=0)
    a, b = refer(folders[0], "a"), refer(folders[1], "b")
    for ref in (a, b):
        spy.core.load_adapter(ref)
    prompt = prompt_of(random.Random(5), 7)
    for id_, ref in (("first", b), ("queued", a)):
        spy.core.add(greedy(id_, prompt, TOKENS, adapter=ref))
    spy.core.unload_adapter(a.id)  # while its request waits for a slot
    said = spy.run([])
    assert tokens(said["first"]) == expected(folders[1], prompt)
    assert tokens(said["queued"]) == expected(folders[0], prompt)
    assert spy.core.take_unloaded() == [a.id]
    assert spy.is_at_rest()


def test_known_adapters_that_nobody_asks_for_stay_off_the_device(tiny_model: Path, folders: list[Path]) -> None:
    spy = Spy(tiny_model, adapter_slots=2)
    for folder in folders[:5]:
        spy.core.load_adapter(refer(folder, folder.name))
    spy.run([greedy("r", prompt_of(random.Random(6), 9), TOKENS)])
    assert (spy.together, spy.resident, spy.core.adapters.slots.loads) == (0, 0, 0)
