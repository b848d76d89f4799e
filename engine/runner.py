"""Runs the steps that the scheduler plans: tokens in, sampled tokens out.

Knows: the model, its KV cache and its adapters on one device, and how a plan becomes tensors. Does not know: why
these sequences were chosen, text, or requests that wait.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.adaptercache import HostAdapter
from engine.adapters import read_adapter
from engine.kvcache import KvCache, fit, free_memory
from engine.lora import LoraStore
from engine.modelcache import WeightsError
from engine.models.config import ModelConfig
from engine.models.llama import Batch, Llama
from engine.sampler import Sampled, Sampler
from engine.scheduler import StepPlan
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
from kernels.paged_attention import AttentionBatch

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
            forms = operations(self._device)
            self._model = Llama(model, load_weights(folder), operations=forms, device=self._device, dtype=self._dtype)
        except WeightsError as error:
            raise EngineUnavailable(str(error)) from error
        except RuntimeError as error:  # what torch raises out of memory, and dispatch without Triton
            raise EngineUnavailable(f"the model cannot be put on {self._device.type}: {error}") from error
        self.block_size = config.block_size
        self.num_blocks, longest = fit(config, model, dtype=self._dtype, free_bytes=free_memory(self._device))
        self._cache = KvCache(
            model, blocks=self.num_blocks, block_size=self.block_size, dtype=self._dtype, device=self._device
        )
        self._adapters = LoraStore(model, form=forms.lora, device=self._device, dtype=self._dtype)
        self._sampler = Sampler(model.vocab, model.eos_token_ids, self._device)
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
        batch = self._batch(plan)
        logits = self._model.forward(batch, self._cache.tensor)
        sampling = [entry.sequence for entry in plan.scheduled if entry.sample]
        drawn = iter(self._sampler.sample(logits, sampling) if sampling else ())
        return [next(drawn) if entry.sample else None for entry in plan.scheduled]

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
        return HostAdapter(info, adapter)

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

    def _batch(self, plan: StepPlan) -> Batch:
        """The plan as tensors, its new blocks cleared."""
        entries = plan.scheduled
        tokens: list[int] = []
        fresh: list[int] = []
        positions, slots = [], []
        for entry in entries:
            start, end = entry.start, entry.start + entry.count
            tokens += entry.sequence.tokens[start:end]
            table = entry.sequence.block_table
            position = np.arange(start, end)
            block = np.asarray(table[start // self.block_size : (end - 1) // self.block_size + 1])
            slots.append(
                block[position // self.block_size - start // self.block_size] * self.block_size
                + position % self.block_size
            )
            positions.append(position)
            fresh += table[-(-start // self.block_size) : (end - 1) // self.block_size + 1]
        self._cache.clear(fresh)
        counts = [entry.count for entry in entries]
        ends = np.cumsum(counts) - 1
        used = [-(-(entry.start + entry.count) // self.block_size) for entry in entries]
        return Batch(
            tokens=self._put(np.asarray(tokens)),
            positions=self._put(np.concatenate(positions)),
            slots=self._put(np.concatenate(slots)),
            sampled=self._put(ends[[entry.sample for entry in entries]]),
            attention=AttentionBatch(
                counts=counts,
                contexts=[entry.start + entry.count for entry in entries],
                tables=[entry.sequence.block_table[:blocks] for entry, blocks in zip(entries, used, strict=True)],
            ),
            lora=self._adapters.step([(entry.sequence.adapter_id, entry.count) for entry in entries]),
        )

    def _put(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._device, non_blocking=True)


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
