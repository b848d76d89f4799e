"""The runner: memory, devices, blocks that begin a new life, and steps done again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core import build
from engine.kvcache import block_bytes, fit
from engine.models.config import ModelConfig
from engine.models.llama import Llama
from engine.models.native import NativeLlama
from engine.runner import Runner
from engine.scheduler import Scheduled, StepPlan
from engine.sequence import Sequence, SequenceGroup
from engine.types import AdapterRef, AdapterRejected, EngineConfig, EngineUnavailable, Request, SamplingParams
from tests.generation import greedy, run
from tests.peft_adapters import make_adapter, refer

BLOCK = 4
both = pytest.mark.parametrize("native", ["on", "off"])
"""By the native step and by torch."""


def config(model: Path, **changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": BLOCK, "max_num_seqs": 4}
    return EngineConfig(model=str(model), **(fields | changes))


def sequence(prompt: list[int], blocks: list[int], *, adapter: AdapterRef | None = None) -> Sequence:
    request = Request(id="r", prompt=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=99), adapter=adapter)
    made = SequenceGroup(request, arrival=1, cache_root=b"").sequences[0]
    made.block_table = blocks
    return made


def compute(runner: Runner, *entries: tuple[Sequence, int, int]) -> list[int | None]:
    scheduled = [Scheduled(s, start, count, start + count == len(s.tokens)) for s, start, count in entries]
    return [None if token is None else token.token_id for token in runner.execute(StepPlan(scheduled))]


PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15]


@both
def test_only_entries_that_sample_get_a_token(native: str, tiny_model: Path) -> None:
    runner = Runner(config(tiny_model, native=native))
    whole, chunked = sequence(PROMPT, [5, 1, 3]), sequence(PROMPT, [2, 9, 8])
    (expected,) = compute(runner, (whole, 0, 9))
    assert expected is not None
    assert compute(runner, (chunked, 0, 5)) == [None]
    whole.tokens.append(expected)
    following, last = compute(runner, (whole, 9, 1), (chunked, 5, 4))
    assert last == expected
    assert following is not None
    assert runner.execute(StepPlan()) == []


@both
def test_a_step_done_again_does_the_same(native: str, tiny_model: Path) -> None:
    runner = Runner(config(tiny_model, native=native))
    one = sequence(PROMPT, [5, 1, 3])
    compute(runner, (one, 0, 6))
    first = compute(runner, (one, 6, 3))
    assert compute(runner, (one, 6, 3)) == first


@both
def test_a_copied_block_carries_on(native: str, tiny_model: Path) -> None:
    """A second choice shares the full blocks and takes a copy of the last, partly filled one."""
    runner = Runner(config(tiny_model, native=native))
    one = sequence(PROMPT, [5, 1, 3])
    (token,) = compute(runner, (one, 0, 9))
    assert token is not None
    runner.copy_block(3, 6)
    other = sequence([*PROMPT, token], [5, 1, 6])
    one.tokens.append(token + 1)  # what the first goes on with must not reach the second
    compute(runner, (one, 9, 1))
    alone = sequence([*PROMPT, token], [10, 11, 12])
    assert compute(runner, (other, 9, 1)) == compute(runner, (alone, 0, 10))


@both
def test_numbers_that_are_not_finite_stay_with_their_request(native: str, tiny_model: Path) -> None:
    """A block taken over from a request whose keys and values overflowed is as good as new."""
    runner = Runner(config(tiny_model, native=native))
    expected = compute(runner, (sequence(PROMPT[:2], [0]), 0, 2), (sequence(PROMPT, [1, 2, 3]), 0, 9))
    runner._cache.tensor[:, 4:] = float("nan")  # as if such a request had filled every other block
    short, long = sequence(PROMPT[:2], [10]), sequence(PROMPT, [13, 5, 9])
    assert compute(runner, (short, 0, 2), (long, 0, 9)) == expected


@both
def test_an_adapter_that_overflows_harms_no_other_row(native: str, tiny_model: Path, tmp_path: Path) -> None:
    wild = make_adapter(tiny_model, tmp_path / "wild", seed=1, r=4, target_modules="all-linear")
    tensors = load_file(wild / "adapter_model.safetensors")
    save_file({name: tensor * 1e30 for name, tensor in tensors.items()}, wild / "adapter_model.safetensors")
    calm = make_adapter(tiny_model, tmp_path / "calm", seed=2, r=4, target_modules="all-linear")
    refs = [refer(wild, "wild"), refer(calm, "calm"), None]
    results: list[dict[str, list[int]]] = []
    for chosen in ([1], [2], [0, 1, 2, 0]):
        core = build(config(tiny_model, native=native))
        for ref in refs:
            if ref is not None:
                core.load_adapter(ref)
        tokens, _ = run(core, [greedy(f"{i} {n}", PROMPT, 6, adapter=refs[i]) for n, i in enumerate(chosen)], apart=1)
        results.append({key.split()[0]: value for key, value in tokens.items()})
    assert results[2]["1"] == results[0]["1"]
    assert results[2]["2"] == results[1]["2"]


@both
def test_preemption_and_few_blocks_change_no_token(native: str, tiny_model: Path) -> None:
    roomy = build(config(tiny_model, native=native))
    model = ModelConfig.from_folder(tiny_model)
    size = block_bytes(model, BLOCK, torch.float32)
    tight = build(
        config(tiny_model, native=native, kv_cache_bytes=size * 14, max_model_len=40, max_num_batched_tokens=16)
    )
    requests = [greedy(str(n), [3 + n, *PROMPT, 40 + n], 20) for n in range(4)]
    expected, _ = run(roomy, requests)
    tokens, _ = run(tight, requests)
    assert tight.scheduler.stats.preemptions > 0
    assert tokens == expected


# ---- adapters ----


def test_an_adapter_is_read_placed_and_removed(tiny_model: Path, tmp_path: Path) -> None:
    runner = Runner(config(tiny_model))
    ref = refer(make_adapter(tiny_model, tmp_path / "one", seed=1, r=4, target_modules=["q_proj"]), "one")
    adapter = runner.read_adapter(ref)
    info = adapter.info
    assert (info.id, info.digest, info.rank, info.targets) == (ref.id, ref.digest, 4, ("q_proj",))
    assert info.nbytes == 2 * (4 * 64 + 64 * 4) * 4
    assert adapter.nbytes >= info.nbytes  # a form that is packed for the native step has its ranks padded
    runner.place_adapter(ref.id, adapter)
    runner.place_adapter(ref.id, adapter)
    runner.remove_adapter(ref.id)
    runner.remove_adapter("never placed")
    with pytest.raises(AdapterRejected):
        runner.read_adapter(AdapterRef(id="3", name="three", path=str(tmp_path / "nowhere")))


# ---- sizes and configuration ----


def test_blocks_are_bounded_by_what_the_sequences_can_fill(tiny_model: Path) -> None:
    runner = Runner(config(tiny_model, max_num_seqs=3, max_model_len=10))
    assert runner.num_blocks == 3 * 3
    assert runner.info.max_model_len == 10
    assert runner.info.vocab_size == 512
    assert runner.info.eos_token_ids == (2,)


def test_a_length_that_was_not_asked_for_is_lowered_to_the_memory(tiny_model: Path) -> None:
    model = ModelConfig.from_folder(tiny_model)
    size = block_bytes(model, BLOCK, torch.float32)
    assert size == 2 * BLOCK * 2 * 2 * 16 * 4
    given = config(tiny_model)
    assert fit(given, model, dtype=torch.float32, free_bytes=10 * size * 10 // 3 + 1) == (10, 40)
    assert fit(given, model, dtype=torch.float32, free_bytes=1 << 40) == (4 * 128, 512)
    with pytest.raises(EngineUnavailable, match="hold no block"):
        fit(given, model, dtype=torch.float32, free_bytes=size)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 513}, "takes 1 to 512"),
        ({"max_model_len": 0}, "takes 1 to 512"),
        ({"max_model_len": 100, "kv_cache_bytes": 40_000}, "max_model_len 100 takes"),
        ({"kv_cache_bytes": 100}, "hold no block"),
        ({"kv_cache_bytes": 1 << 60, "max_num_seqs": 1 << 40}, "no memory for a KV cache"),
        ({"block_size": 0}, "at least 1"),
        ({"device": "tpu"}, "not one of auto, cpu, cuda"),
        ({"dtype": "int8"}, "not one of auto, float32"),
        ({"native": "maybe"}, "not one of auto, on, off"),
        ({"quantization": "int2"}, "not one of none, int8, int4"),
    ],
)
def test_an_impossible_configuration_is_told_in_words(changes: dict[str, Any], words: str, tiny_model: Path) -> None:
    with pytest.raises(EngineUnavailable) as caught:
        Runner(config(tiny_model, **changes))
    assert words in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_told_in_words(tiny_model: Path) -> None:
    with pytest.raises(EngineUnavailable, match="has none"):
        Runner(config(tiny_model, device="cuda"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a language model"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"num_key_value_heads": 3}, "4 attention heads over 3"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"intermediate_size": 132}, "by config.json (64, 132)"),
        ({"num_hidden_layers": 3}, "lacks 9 tensors"),
        ({"num_hidden_layers": 1}, "has no place"),
        ({"attention_bias": True}, "lacks 8 tensors"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "lacks or garbles"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer type"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial rotary"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    changes: dict[str, Any], words: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(EngineUnavailable) as caught:
        Runner(config(folder))
    assert words in str(caught.value)


# ---- which path computes ----


def test_the_native_step_is_taken_where_it_can_be_had(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    for native, kind in (("auto", NativeLlama), ("on", NativeLlama), ("off", Llama)):
        assert isinstance(Runner(config(tiny_model, native=native))._model, kind)
    assert not caplog.records


@pytest.mark.parametrize("changes", [{"dtype": "float16"}, {"dtype": "bfloat16", "block_size": 5}])
def test_what_the_native_step_cannot_compute_torch_does_and_says_so(
    changes: dict[str, Any], tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(config(tiny_model, **changes))
    assert isinstance(runner._model, Llama)
    assert [record.getMessage() for record in caplog.records] == [
        message for message in caplog.messages if message.startswith("steps are computed by torch")
    ]
    assert len(caplog.records) == 1
    with pytest.raises(EngineUnavailable, match="was asked for and cannot be used"):
        Runner(config(tiny_model, native="on", **changes))


def test_no_compiler_is_no_reason_to_stop(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("METERHOUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert isinstance(Runner(config(tiny_model))._model, Llama)
    (record,) = caplog.records
    assert "no C++ compiler" in record.getMessage()
    with pytest.raises(EngineUnavailable, match=r"asked for and cannot be used: there is no C\+\+ compiler"):
        Runner(config(tiny_model, native="on"))
    with pytest.raises(EngineUnavailable, match="int8 needs the native CPU step"):
        Runner(config(tiny_model, quantization="int8"))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_run_through_the_engine(quantization: str, tiny_model: Path) -> None:
    core = build(config(tiny_model, dtype="bfloat16", quantization=quantization))
    tokens, _ = run(core, [greedy(str(n), [3 + n, *PROMPT], 8) for n in range(4)], apart=1)
    assert all(len(said) == 8 for said in tokens.values())
    with pytest.raises(EngineUnavailable, match=f"{quantization} needs the native CPU step"):
        Runner(config(tiny_model, native="off", quantization=quantization))


def test_rows_of_one_adapter_lie_side_by_side_and_results_come_in_the_plan_s_order(
    tiny_model: Path, tmp_path: Path
) -> None:
    refs = [
        refer(make_adapter(tiny_model, tmp_path / name, seed=seed, r=4, target_modules="all-linear"), name)
        for seed, name in enumerate(("a", "b"))
    ]
    runner = Runner(config(tiny_model))
    for ref in refs:
        runner.place_adapter(ref.id, runner.read_adapter(ref))
    users = [refs[1], None, refs[0], refs[1], None, refs[0]]
    alone = [
        compute(runner, (sequence(PROMPT, [3 * n, 3 * n + 1, 3 * n + 2], adapter=user), 0, 9))[0]
        for n, user in enumerate(users)
    ]
    together = [(sequence(PROMPT, [20 + 3 * n, 21 + 3 * n, 22 + 3 * n], adapter=u), 0, 9) for n, u in enumerate(users)]
    assert compute(runner, *together) == alone
    assert len(set(alone)) == 3
