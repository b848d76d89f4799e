"""Loaded adapters on the device, and the part of them that one step's batch uses.

Knows: which adapters are loaded, which of them lie side by side in packed form, and whose rows are whose. Does not
know: where an adapter came from (`engine.adapters`) or how its product is computed (`kernels.lora`).

Packing costs milliseconds, so what is packed stays until a batch needs an adapter that is not in it; adapters no row
uses are kept in the pack only while their ranks are few, because the CPU form multiplies by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.adapters import Adapter, shapes
from engine.models.config import ModelConfig
from engine.types import AdapterUnknown
from kernels.lora import LoraBatch, LoraSegment, LoraWeights

FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The model's fused linear layers and the projections in each, in the order of their output columns."""

IDLE_RANKS_MAX = 128
"""Packed ranks that may be more than what a batch uses."""

LoraForm = Callable[[torch.Tensor, torch.Tensor, LoraWeights, LoraBatch], None]
Entered = Callable[[str, Adapter], None]
Left = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Pack:
    places: dict[str, tuple[int, int]]  # adapter id → offset and rank on the rank axis
    ranks: int
    layers: list[dict[str, LoraWeights]]  # by fused layer; absent where no adapter changes it


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The adapters of one step, ready to be applied layer by layer."""

    pack: _Pack
    batch: LoraBatch
    form: LoraForm

    def apply(self, layer: int, fused: str, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add to `y` [tokens, outputs], in place, what each row's adapter makes of `x` [tokens, inputs]."""
        weights = self.pack.layers[layer].get(fused)
        if weights is not None:
            self.form(y, x, weights, self.batch)


class LoraStore:
    """The resident adapters of one model. Adding and removing is all or nothing and touches no other adapter.

    The one place that knows when an adapter becomes resident and when it leaves: whoever keeps something of his own
    about residents (the native step: where their matrices lie) is told through `watch`.
    """

    def __init__(self, model: ModelConfig, *, form: LoraForm, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._form = form
        self._device = device
        self._dtype = dtype
        self._adapters: dict[str, Adapter] = {}
        self._pack: _Pack | None = None
        self._shapes = shapes(model)
        self._entered: list[Entered] = []
        self._left: list[Left] = []

    def watch(self, entered: Entered, left: Left) -> None:
        """Call `entered(id, adapter)` for every resident, now and whenever one comes, and `left(id)` when one goes.

        Always between two steps. The tensors of `adapter` are on the device, contiguous, and neither move nor change
        until `left` has returned. When `entered` raises, the adapter does not come in, and those told before are told
        that it left.
        """
        for adapter_id, adapter in self._adapters.items():
            entered(adapter_id, adapter)
        self._entered.append(entered)
        self._left.append(left)

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, adapter_id: str) -> Adapter | None:
        return self._adapters.get(adapter_id)

    def add(self, adapter_id: str, adapter: Adapter) -> None:
        """Make it resident; raises what torch raises out of memory. One that is resident stays as it is."""
        if adapter_id in self._adapters:
            return
        moved = {place: (self._move(a), self._move(b)) for place, (a, b) in adapter.weights.items()}
        resident = replace(adapter, weights=moved)
        for told, entered in enumerate(self._entered):
            try:
                entered(adapter_id, resident)
            except BaseException:
                for left in self._left[:told]:
                    left(adapter_id)
                raise
        self._adapters[adapter_id] = resident

    def remove(self, adapter_id: str) -> None:
        """Nothing may use it any more; an id that is not resident is no error."""
        if adapter_id not in self._adapters:
            return
        for left in self._left:
            left(adapter_id)
        del self._adapters[adapter_id]
        if self._pack is not None and adapter_id in self._pack.places:
            self._pack = None  # its memory goes at once

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device).contiguous()

    def step(self, users: Sequence[tuple[str | None, int]]) -> LoraStep | None:
        """For rows in order as (adapter id or None, rows); None when no row has an adapter.

        Raises `AdapterUnknown` when one is not loaded.
        """
        used = {adapter_id for adapter_id, _ in users if adapter_id is not None}
        if not used:
            return None
        if not used <= self._adapters.keys():
            raise AdapterUnknown("the request's adapter is not loaded")
        pack = self._packed(used)
        segments: list[LoraSegment] = []
        row = 0
        previous: str | None = None
        for adapter_id, rows in users:
            if adapter_id is not None:
                if adapter_id == previous:  # side by side with the rows before
                    last = segments.pop()
                    segments.append(LoraSegment(last.row, last.rows + rows, last.offset, last.rank))
                else:
                    segments.append(LoraSegment(row, rows, *pack.places[adapter_id]))
            previous = adapter_id
            row += rows
        return LoraStep(pack, LoraBatch(rows=row, ranks=pack.ranks, segments=segments), self._form)

    def _packed(self, used: set[str]) -> _Pack:
        needed = sum(self._adapters[adapter_id].rank for adapter_id in used)
        pack = self._pack
        if pack is not None and used <= pack.places.keys() and pack.ranks <= needed + IDLE_RANKS_MAX:
            return pack
        chosen = sorted(used)
        spare = IDLE_RANKS_MAX
        for adapter_id in pack.places if pack is not None else ():
            if adapter_id not in used and self._adapters[adapter_id].rank <= spare:
                spare -= self._adapters[adapter_id].rank
                chosen.append(adapter_id)
        self._pack = None  # the old one's memory goes before the new one's comes
        self._pack = self._make(chosen)
        return self._pack

    def _make(self, chosen: list[str]) -> _Pack:
        places: dict[str, tuple[int, int]] = {}
        ranks = 0
        for adapter_id in chosen:
            places[adapter_id] = (ranks, self._adapters[adapter_id].rank)
            ranks += self._adapters[adapter_id].rank
        layers = []
        for layer in range(self._model.layers):
            fused = {name: self._fuse(layer, parts, places, ranks) for name, parts in FUSED.items()}
            layers.append({name: weights for name, weights in fused.items() if weights is not None})
        return _Pack(places, ranks, layers)

    def _fuse(
        self, layer: int, parts: Sequence[str], places: dict[str, tuple[int, int]], ranks: int
    ) -> LoraWeights | None:
        """One fused layer: a slice for each projection that any of the adapters changes."""
        columns, expands, slices = [], [], []
        column = 0
        for part in parts:
            owners = {
                offset: pair
                for adapter_id, (offset, _) in places.items()
                if (pair := self._adapters[adapter_id].weights.get((layer, part))) is not None
            }
            inputs, outputs = self._shapes[part]
            if owners:
                shrink = torch.zeros(ranks, inputs, dtype=self._dtype, device=self._device)
                expand = torch.zeros(ranks, outputs, dtype=self._dtype, device=self._device)
                for offset, (a, b) in owners.items():
                    shrink[offset : offset + len(a)] = a
                    expand[offset : offset + len(a)] = b.T
                columns.append(column)
                expands.append(expand)
                slices.append(shrink)
            column += outputs
        return LoraWeights(torch.stack(slices), tuple(expands), tuple(columns)) if slices else None
