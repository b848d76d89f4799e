"""The passes over whole rows of scores [rows, vocabulary] that sampling needs, and nothing that is small.

Knows: where the scores lie. On a CPU they are numpy's, in this thread: its argmax is ten times as fast as torch's, and
a parallel region of torch waits for a scheduler's tick whenever another process has one of the cores. On a device
they are torch's, and what comes back to the host is small. Does not know: what the scores mean or who asked.

A row's results depend on that row alone, to the last bit: not on how many rows there are or where it stands.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]

_CEILINGS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_CEILINGS = _CEILINGS.astype(np.float32)  # [byte, bit]: what the bits of a mask leave of a score at most

BLOCK = 32  # columns of which `block_peaks` gives the largest
CHUNK = 256  # columns of which `masses` gives the sum


class Rows(Protocol):
    """Scores [count, vocab], float32. Indices named flat are `row * vocab + token`."""

    @property
    def count(self) -> int: ...
    @property
    def vocab(self) -> int: ...

    def argmax(self) -> Ids:
        """[count]: the first of the largest in each row; of a row with NaN any token."""
        ...

    def pick(self, rows: Ids) -> Rows:
        """A copy of these rows."""
        ...

    def block_peaks(self) -> Floats:
        """[count, blocks]: the largest of each block, so the k-th largest of these is exceeded by under k others.

        A block is some `BLOCK` columns or, at the end, one column.
        """
        ...

    def kth(self, row: int, k: int) -> float:
        """The k-th largest score of one row, 1 <= k <= vocab."""
        ...

    def above(self, thresholds: Floats) -> tuple[Ids, Floats]:
        """Flat indices, ascending, of all that is at least its row's threshold [count], and their scores."""
        ...

    def count_above(self, values: Floats) -> Ids:
        """[count]: how many scores are greater than the row's value."""
        ...

    def masses(self, peaks: Floats, scales: Floats) -> Floats:
        """[count, chunks]: sums of the weights exp((score - peak) * scale) over `CHUNK` columns each.

        `peaks` and `scales` [count]. The weights are kept for the next two until the next call.
        """
        ...

    def chunk(self, rows: Ids, numbers: Ids) -> Floats:
        """[len(rows), CHUNK]: the weights of one chunk of each of these rows, 0 beyond the vocabulary's end."""
        ...

    def mass_above(self, rows: Ids, weights: Floats) -> Doubles:
        """[len(rows)]: the sum of those weights in each of these rows that are greater than the given one."""
        ...

    def read(self, flat: Ids) -> Floats: ...

    def write(self, flat: Ids, values: Floats | float) -> None: ...

    def add(self, flat: Ids, values: Floats) -> None:
        """Add to each; no index stands twice."""
        ...

    def clear(self, rows: Ids) -> None:
        """Make every score of these rows -inf."""
        ...

    def mask(self, rows: Ids, bits: Bits) -> None:
        """Make the scores of these rows -inf where a bit is 0. `bits` [len(rows), bytes]: token t's is bit t % 8 of
        byte t // 8; there may be more bits than tokens."""
        ...


def rows_of(logits: Tensor, scratch: Scratch) -> Rows:
    """The logits [rows, vocab] of any float type as rows; those that are float32 and contiguous are not copied."""
    scores = logits.to(torch.float32).contiguous()
    return HostRows(scores.numpy(), scratch) if scores.device.type == "cpu" else DeviceRows(scores)


def padded_above(rows: Rows, thresholds: Floats) -> tuple[Ids, Floats]:
    """Token ids [count, most], ascending, and scores of all that is at least its row's threshold.

    Shorter rows end with the id 0 and the score -inf.
    """
    flat, scores = rows.above(thresholds)
    numbers, tokens = np.divmod(flat, rows.vocab)
    sizes = np.bincount(numbers, minlength=rows.count)
    places = np.arange(len(flat)) - np.repeat(sizes.cumsum() - sizes, sizes)
    ids = np.zeros((rows.count, max(1, int(sizes.max()))), dtype=np.int64)
    padded = np.full(ids.shape, -np.inf, dtype=np.float32)
    ids[numbers, places] = tokens
    padded[numbers, places] = scores
    return ids, padded


class Scratch:
    """Memory for the weights of a step, kept from step to step: fresh pages would cost more than the sums."""

    def __init__(self) -> None:
        self._weights = np.zeros((0, 0), dtype=np.float32)
        self._ceilings = np.zeros((0, 8), dtype=np.float32)

    def weights(self, rows: int, vocab: int) -> Floats:
        """[rows, vocab up to whole chunks]; the columns beyond the vocabulary are 0 and shall stay so."""
        width = -(-vocab // CHUNK) * CHUNK
        held, wide = self._weights.shape
        if wide != width or held < rows:
            self._weights = np.zeros((rows, width), dtype=np.float32)
        return self._weights[:rows]

    def ceilings(self, bits: Bits) -> Floats:
        """[8 * len(bits)]: infinity where a bit is set, else -infinity."""
        if len(self._ceilings) != len(bits):
            self._ceilings = np.zeros((len(bits), 8), dtype=np.float32)
        return _CEILINGS.take(bits, axis=0, out=self._ceilings, mode="clip").reshape(-1)


class HostRows:
    """Rows in the host's memory."""

    def __init__(self, scores: Floats, scratch: Scratch) -> None:
        self._scores = scores
        self._flat = scores.reshape(-1)
        self._scratch = scratch
        self._weights = scores
        self.count, self.vocab = scores.shape

    def argmax(self) -> Ids:
        tokens: Ids = self._scores.argmax(-1)
        return tokens

    def pick(self, rows: Ids) -> HostRows:
        return HostRows(self._scores[rows], self._scratch)

    def block_peaks(self) -> Floats:
        width = self.vocab // BLOCK
        whole = width * BLOCK
        # Blocks are columns `width` apart: the pass then runs along memory.
        peaks = self._scores[:, :whole].reshape(self.count, BLOCK, width).max(1)
        return peaks if whole == self.vocab else np.concatenate([peaks, self._scores[:, whole:]], axis=1)

    def kth(self, row: int, k: int) -> float:
        return float(np.partition(self._scores[row], self.vocab - k)[self.vocab - k])

    def above(self, thresholds: Floats) -> tuple[Ids, Floats]:
        flat = np.flatnonzero(self._scores >= thresholds[:, None])
        return flat, self._flat[flat]

    def count_above(self, values: Floats) -> Ids:
        counts: Ids = np.count_nonzero(self._scores > values[:, None], axis=1)
        return counts

    def masses(self, peaks: Floats, scales: Floats) -> Floats:
        self._weights = self._scratch.weights(self.count, self.vocab)
        weights = self._weights[:, : self.vocab]
        np.subtract(self._scores, peaks[:, None], out=weights)
        if (scales != 1.0).any():
            weights *= scales[:, None]
        np.exp(weights, out=weights)
        return _chunk_sums(self._weights)

    def chunk(self, rows: Ids, numbers: Ids) -> Floats:
        chunks = self._weights.reshape(-1, CHUNK)
        found: Floats = chunks[rows * (len(chunks) // self.count) + numbers]
        return found

    def mass_above(self, rows: Ids, weights: Floats) -> Doubles:
        held = self._weights[rows]
        held *= held > weights[:, None]
        total: Doubles = _chunk_sums(held).sum(1, dtype=np.float64)
        return total

    def read(self, flat: Ids) -> Floats:
        return self._flat[flat]

    def write(self, flat: Ids, values: Floats | float) -> None:
        self._flat[flat] = values

    def add(self, flat: Ids, values: Floats) -> None:
        self._flat[flat] += values

    def clear(self, rows: Ids) -> None:
        self._scores[rows] = -np.inf

    def mask(self, rows: Ids, bits: Bits) -> None:
        # 11 us a row; bits unpacked to a condition take 15 to 200 us, by how many are set.
        for row, its_bits in zip(rows.tolist(), bits, strict=True):
            ceilings = self._scratch.ceilings(its_bits)[: self.vocab]
            np.minimum(self._scores[row], ceilings, out=self._scores[row])


def _chunk_sums(weights: Floats) -> Floats:
    """[rows, whole chunks of columns] → [rows, chunks]; einsum adds three times as fast as sum along short axes."""
    sums: Floats = np.einsum("ijk->ij", weights.reshape(len(weights), -1, CHUNK))
    return sums


class DeviceRows:
    """Rows in a device's memory, worked on there."""

    def __init__(self, scores: Tensor) -> None:
        self._scores = scores
        self._flat = scores.view(-1)
        self._weights = scores
        self.count, self.vocab = scores.shape

    def argmax(self) -> Ids:
        return _host(self._scores.argmax(-1))

    def pick(self, rows: Ids) -> DeviceRows:
        return DeviceRows(self._scores[self._put(rows)])

    def block_peaks(self) -> Floats:
        width = self.vocab // BLOCK
        whole = width * BLOCK
        peaks = self._scores[:, :whole].reshape(self.count, BLOCK, width).amax(1)
        return _host(torch.cat([peaks, self._scores[:, whole:]], dim=1))

    def kth(self, row: int, k: int) -> float:
        return float(self._scores[row].topk(k).values[-1])

    def above(self, thresholds: Floats) -> tuple[Ids, Floats]:
        flat = (self._scores >= self._put(thresholds)[:, None]).view(-1).nonzero()[:, 0]
        return _host(flat), _host(self._flat[flat])

    def count_above(self, values: Floats) -> Ids:
        return _host((self._scores > self._put(values)[:, None]).sum(-1))

    def masses(self, peaks: Floats, scales: Floats) -> Floats:
        weights = ((self._scores - self._put(peaks)[:, None]) * self._put(scales)[:, None]).exp_()
        beyond = -self.vocab % CHUNK
        self._weights = torch.nn.functional.pad(weights, (0, beyond)).view(self.count, -1, CHUNK)
        return _host(self._weights.sum(-1))

    def chunk(self, rows: Ids, numbers: Ids) -> Floats:
        return _host(self._weights[self._put(rows), self._put(numbers)])

    def mass_above(self, rows: Ids, weights: Floats) -> Doubles:
        held = self._weights[self._put(rows)]
        held *= held > self._put(weights)[:, None, None]
        return _host(held.sum(-1).sum(-1, dtype=torch.float64))

    def read(self, flat: Ids) -> Floats:
        return _host(self._flat[self._put(flat)])

    def write(self, flat: Ids, values: Floats | float) -> None:
        self._flat[self._put(flat)] = values if isinstance(values, float) else self._put(values)

    def add(self, flat: Ids, values: Floats) -> None:
        self._flat[self._put(flat)] += self._put(values)

    def clear(self, rows: Ids) -> None:
        self._scores[self._put(rows)] = -torch.inf

    def mask(self, rows: Ids, bits: Bits) -> None:
        places = torch.arange(8, device=self._scores.device, dtype=torch.uint8)
        allowed = (self._put(bits)[:, :, None] >> places & 1).view(len(rows), -1)[:, : self.vocab].bool()
        at = self._put(rows)
        self._scores[at] = self._scores[at].masked_fill(~allowed, -torch.inf)

    def _put(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._scores.device)


def _host(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()
