"""The paged KV cache: how large it may be, and its memory.

Knows: bytes a block takes, the memory that is free, and the layout the attention kernels read. Does not know: which
sequence holds which block (`engine.blocks`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.models.config import ModelConfig
from engine.types import EngineConfig, EngineUnavailable
from kernels.memory import zeroed_bytes


class KvCache:
    """[layers, blocks, block_size, 2 * kv_heads, head_dim]: a token's key heads, then its value heads.

    The native step has a layout of its own (kernels/cpu/attention.h): [layers, blocks, kv_heads, 2, head_dim *
    block_size]. A block takes as much in either. Zeroed, so that what no sequence has written is finite; on a CPU the
    pages are taken when first touched.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        native: bool = False,
    ) -> None:
        shape = (
            (model.layers, blocks, model.kv_heads, 2, model.head_dim * block_size)
            if native
            else (model.layers, blocks, block_size, 2 * model.kv_heads, model.head_dim)
        )
        try:
            if device.type == "cpu":
                self.tensor = zeroed_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            else:
                self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        except (MemoryError, RuntimeError) as error:  # torch's class for it is a GPU's only
            raise EngineUnavailable(f"no memory for a KV cache of {blocks} blocks of {block_size} tokens") from error

    def clear(self, blocks: Sequence[int]) -> None:
        """Blocks that begin a new life: numbers of their last owner, not finite perhaps, reach nobody."""
        if blocks:
            self.tensor.index_fill_(1, torch.tensor(blocks, device=self.tensor.device), 0.0)

    def copy(self, src: int, dst: int) -> None:
        self.tensor[:, dst] = self.tensor[:, src]


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    return model.layers * block_size * 2 * model.kv_heads * model.head_dim * dtype.itemsize


def fit(config: EngineConfig, model: ModelConfig, *, dtype: torch.dtype, free_bytes: int) -> tuple[int, int]:
    """(blocks, longest sequence in tokens) that the configuration asks for and the memory allows.

    Never more blocks than `max_num_seqs` sequences of full length can fill. A length that was not asked for is
    lowered to what fits; one that was, and does not fit, raises `EngineUnavailable`.
    """
    if min(config.block_size, config.max_num_seqs, config.max_num_batched_tokens) < 1:
        raise EngineUnavailable("block_size, max_num_seqs and max_num_batched_tokens must be at least 1")
    asked = config.max_model_len
    if asked is not None and not 1 <= asked <= model.max_position:
        raise EngineUnavailable(f"max_model_len is {asked}, and the model takes 1 to {model.max_position} tokens")
    longest = asked or model.max_position
    size = block_bytes(model, config.block_size, dtype)
    budget = config.kv_cache_bytes
    if budget is None:
        budget = int(config.memory_utilization * free_bytes)
    blocks = min(budget // size, config.max_num_seqs * -(-longest // config.block_size))
    if blocks < 1:
        raise EngineUnavailable(
            f"{budget} bytes of KV cache hold no block: one of {config.block_size} tokens is {size}"
        )
    held = blocks * config.block_size
    if held < longest and asked is not None:
        raise EngineUnavailable(
            f"a sequence of max_model_len {asked} takes {-(-asked // config.block_size) * size} bytes of KV cache, "
            f"and there are {budget}: lower max_model_len or give more by kv_cache_bytes"
        )
    return blocks, min(longest, held)


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken now without harm: of the GPU, or of the machine and the container around us."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(), _container_left())


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no Linux: half of all there is


def _container_left() -> int:
    """What the control group (v2) leaves; a lot when there is none or it sets no limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            return max(0, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return 1 << 62
