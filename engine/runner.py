"""Runs the steps that the scheduler plans: tokens in, sampled tokens out.

Knows: the model, its KV cache and its adapters on one device, and how a plan becomes tensors. Does not know: why
these sequences were chosen, text, or requests that wait.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from engine.adaptercache import HostAdapter
from engine.adapters import read_adapter
from engine.kvcache import KvCache, fit, free_memory
from engine.lora import LoraStore
from engine.modelcache import WeightsError
from engine.models.batch import Batch
from engine.models.config import ModelConfig
from engine.models.llama import Llama
from engine.models.native import NativeLlama, unsupported
from engine.models.store import WeightStore
from engine.sampler import Sampled, Sampler
from engine.scheduler import Scheduled, StepPlan
from engine.types import (
    AdapterInfo,
    AdapterRef,
    AdapterRejected,
    EngineConfig,
    EngineUnavailable,
    ModelInfo,
)
from engine.weights import load_weights
from kernels.dispatch import operations
from kernels.native import NativeError, default_cache_dir, opened, usable_cores
from kernels.native_matmul import Pool

log = logging.getLogger(__name__)

_SCORED_ROWS = 64  # of a prompt whose log-probabilities are wanted, computed at once
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner:
    """One model on one device. Not thread-safe; the engine's core is its only caller."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the weights and take the memory; raises `EngineUnavailable` with one clear sentence."""
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._config = config
        self._device = _pick_device(config.device)
        folder = Path(config.model)
        try:
            model = ModelConfig.from_folder(folder)
            self._dtype = _pick_dtype(config.dtype, model.dtype, self._device)
            library = _pick_native(config, model, self._device, self._dtype)
            forms = operations(self._device)
            store = WeightStore(model, load_weights(folder), device=self._device, dtype=self._dtype)
            self._model: Llama | NativeLlama
            if library is None:
                self._model = Llama(store, operations=forms, device=self._device)
            else:
                pool = Pool(library, config.threads or usable_cores())
                self._model = NativeLlama(store, pool, dtype=self._dtype, quantization=config.quantization)
        except WeightsError as error:
            raise EngineUnavailable(str(error)) from error
        except MemoryError as error:
            raise EngineUnavailable("there is not enough memory to load the model") from error
        except RuntimeError as error:  # what torch raises out of memory, and dispatch without Triton
            raise EngineUnavailable(f"the model cannot be put on {self._device.type}: {error}") from error
        self.block_size = config.block_size
        self.num_blocks, longest = fit(config, model, dtype=self._dtype, free_bytes=free_memory(self._device))
        self._cache = KvCache(
            model,
            blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=self._dtype,
            device=self._device,
            native=library is not None,
        )
        self._adapters = LoraStore(model, form=forms.lora, device=self._device, dtype=self._dtype)
        if isinstance(self._model, NativeLlama):
            self._model.attach(self._cache.tensor, self.block_size)
            self._adapters.watch(self._model.adapter_entered, self._model.adapter_left)
        self._sampler = Sampler(model.vocab, model.eos_token_ids)
        self.info = ModelInfo(
            name=model.name,
            vocab_size=model.vocab,
            max_model_len=longest,
            eos_token_ids=model.eos_token_ids,
            dtype=str(self._dtype).removeprefix("torch."),
            device=self._device.type,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """Compute every entry of the plan; a token for each that samples, None for the others.

        Doing the same plan again, after it failed, does the same.
        """
        if not plan.scheduled:
            return []
        entries = [left for entry in _side_by_side(plan.scheduled) if (left := self._score(entry)) is not None]
        sampling = [entry.sequence for entry in entries if entry.sample]
        drawn: list[Sampled] = []
        if entries:
            logits = self._logits(_batch(entries, self.block_size))
            drawn = self._sampler.sample(logits, sampling) if sampling else []
        tokens = dict(zip(sampling, drawn, strict=True))
        return [tokens.get(entry.sequence) for entry in plan.scheduled]

    def _score(self, entry: Scheduled) -> Scheduled | None:
        """Compute what wants the logits of a prompt, a few rows at a time, for a row of logits is a vocabulary long.

        Returns what is left of the entry: all of it, or the row that a token is sampled from, or None.
        """
        sequence = entry.sequence
        if not sequence.needs_prompt_logits:
            return entry
        end = entry.start + entry.count - entry.sample
        for start in range(entry.start, end, _SCORED_ROWS):
            count = min(_SCORED_ROWS, end - start)
            batch = _batch([Scheduled(sequence, start, count, False)], self.block_size)
            batch.wanted = list(range(count))
            following = sequence.tokens[start + 1 : start + 1 + count]
            self._sampler.score_prompt(self._logits(batch), sequence, start + 1, following)
        return Scheduled(sequence, end, 1, True) if entry.sample else None

    def _logits(self, batch: Batch) -> torch.Tensor:
        """[wanted rows, vocab] float32, to be read before the next step."""
        if isinstance(self._model, NativeLlama):
            return self._model.forward(batch)
        self._cache.clear(_fresh(batch, self.block_size))
        lora = self._adapters.step(list(zip(batch.users, batch.counts, strict=True)))
        return self._model.forward(batch, self._cache.tensor, lora)

    @torch.inference_mode()
    def copy_block(self, src: int, dst: int) -> None:
        """All that block `src` holds, in every layer, is in `dst` too."""
        self._cache.copy(src, dst)

    @torch.inference_mode()
    def read_adapter(self, ref: AdapterRef) -> HostAdapter:
        """Read and check its files, into the host's memory; raises `AdapterRejected`. Any thread may call it."""
        adapter = read_adapter(ref, self._model.config, max_rank=self._config.max_lora_rank, dtype=self._dtype)
        info = AdapterInfo(
            id=ref.id,
            digest=adapter.digest,
            rank=adapter.rank,
            targets=adapter.targets,
            nbytes=sum(a.nbytes + b.nbytes for a, b in adapter.weights.values()),
        )
        if not isinstance(self._model, NativeLlama):
            return HostAdapter(info, adapter, info.nbytes)
        packed = self._model.pack_adapter(adapter)
        return HostAdapter(info, packed, packed.packed.nbytes)

    @torch.inference_mode()
    def place_adapter(self, adapter_id: str, adapter: HostAdapter) -> None:
        """Make one that was read resident; raises `AdapterRejected` with nothing changed. Twice is once."""
        try:
            self._adapters.add(adapter_id, adapter.content)
        except (RuntimeError, MemoryError) as error:  # torch has a class for it on a GPU only
            raise AdapterRejected("there is no memory left for the adapter") from error

    def remove_adapter(self, adapter_id: str) -> None:
        """Nothing may use it any more; one that is not resident is no error."""
        self._adapters.remove(adapter_id)


def _side_by_side(entries: list[Scheduled]) -> list[Scheduled]:
    """The rows of one adapter next to each other: each adapter is then multiplied once."""
    if all(entry.sequence.adapter_id == entries[0].sequence.adapter_id for entry in entries):
        return entries
    return sorted(entries, key=lambda entry: entry.sequence.adapter_id or "")


def _batch(entries: list[Scheduled], block_size: int) -> Batch:
    batch = Batch()
    for entry in entries:
        sequence, end = entry.sequence, entry.start + entry.count
        tokens = sequence.tokens[entry.start : end]
        batch.add(tokens, entry.start, sequence.block_table[: -(-end // block_size)], sequence.adapter_id)
        if entry.sample:
            batch.wanted.append(len(batch.tokens) - 1)
    return batch


def _fresh(batch: Batch, block_size: int) -> list[int]:
    """The blocks that this step is the first to write to."""
    return [
        block
        for start, table in zip(batch.starts, batch.tables, strict=True)
        for block in table[-(-start // block_size) :]
    ]


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise EngineUnavailable(f"the device {name!r} is not one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineUnavailable("the device cuda was asked for, and this machine or this torch has none")
    return torch.device(name)


def _pick_dtype(name: str, stored: str, device: torch.device) -> torch.dtype:
    """`auto` is as stored; float16 becomes bfloat16 on a CPU, which multiplies it several times as fast."""
    if name == "auto":
        name = "bfloat16" if stored == "float16" and device.type == "cpu" else stored
    if name not in _DTYPES:
        raise EngineUnavailable(f"the dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _pick_native(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> ctypes.CDLL | None:
    """The native library where it is to compute the steps; else None, or why that cannot be had."""
    for field, value, known in (
        ("native", config.native, ("auto", "on", "off")),
        ("quantization", config.quantization, ("none", "int8", "int4")),
    ):
        if value not in known:
            raise EngineUnavailable(f"{field} {value!r} is not one of {', '.join(known)}")
    try:
        return _native(config, model, device, dtype)
    except NativeError as error:
        if config.quantization != "none":
            raise EngineUnavailable(
                f"quantization {config.quantization} needs the native CPU step, which cannot be used: {error}"
            ) from error
        if config.native == "on":
            raise EngineUnavailable(f"the native CPU step was asked for and cannot be used: {error}") from error
        if config.native == "auto" and device.type == "cpu":
            log.warning("steps are computed by torch, not by the native library: %s", error)
        return None


def _native(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> ctypes.CDLL:
    """Raises `NativeError`, with the reason, where there is none."""
    if config.native == "off":
        raise NativeError("it is switched off")
    if device.type != "cpu":
        raise NativeError("it runs on a CPU only")
    reason = unsupported(model, dtype=dtype, block_size=config.block_size)
    if reason is not None:
        raise NativeError(reason)
    return opened(Path(config.cache_dir) if config.cache_dir else default_cache_dir())
