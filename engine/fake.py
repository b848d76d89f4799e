"""A deterministic engine without a model, for the tests of the other rooms.

Knows: everything the `Engine` interface promises (counts, choices, ceilings, aborts, adapters, death and
return), acted out without torch on the caller's event loop. Does not know: how a real engine schedules.
A choice's completion repeats its prompt, starting at the token whose number is the choice's, so a test
can say beforehand what it will read. Blocks of prompts already seen count as cached. Costs are acted too: each token
is said to take `TOKEN_US`, and each step a block is held `STEP_US`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.adapters import CONFIG_FILE, WEIGHTS_FILE, digest_folder
from engine.blocks import cache_root
from engine.client import StepHook, UpdateStream
from engine.scheduler import queue_full
from engine.sequence import SequenceGroup, check_request
from engine.tokens import Detokenizer, Tokenizer
from engine.types import (
    AdapterInfo,
    AdapterRef,
    AdapterRejected,
    AdapterUnknown,
    ChoiceDelta,
    Cost,
    EngineBusy,
    EngineStats,
    EngineUnavailable,
    Finish,
    ModelInfo,
    PromptTooLong,
    Request,
    StepOutput,
    TokenLogprob,
    Update,
)

TOKEN_US = 100
STEP_US = 1000


class FakeTokenizer(Tokenizer):
    """One token a byte of UTF-8, and one (256) that ends a sequence. A chat is lines of `role: content`."""

    vocab_size: int = 257
    eos_token_ids: tuple[int, ...] = (256,)

    def __init__(self) -> None:
        self.special_tokens = {"eos_token": "<end>"}
        self._special_ids = frozenset(self.eos_token_ids)
        self._strips_first_space = False

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        ids = list(text.encode())
        if max_tokens is not None and len(ids) > max_tokens:
            raise PromptTooLong(f"The prompt has {len(ids)} tokens; at most {max_tokens} are possible.")
        return ids

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        lines = [f"{message['role']}: {message.get('content') or ''}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < 256 else b"<end>" if token_id == 256 else b""


class _Job:
    """One request in the fake engine; `group` keeps its counts, its choices and its ceiling."""

    def __init__(self, request: Request, tokenizer: Tokenizer, replies: list[list[int]], arrival: int) -> None:
        self.group = SequenceGroup(request, arrival=arrival, cache_root=b"", arrived_us=time.monotonic_ns() // 1000)
        self.texts = [Detokenizer(tokenizer, request.sampling) for _ in range(request.n)]
        self.replies = replies
        self.stream = UpdateStream()
        self.aborted = False
        self.expired = False
        self.paused = False


class FakeEngine:
    """Acts the `Engine` interface; see `engine.client` for the obligations.

    `step_s` is how long a step takes; `prefill_tokens` how many prompt tokens one step computes;
    `eos_after` ends every choice with the end-of-sequence token after so many tokens; `reply` gives the
    tokens of a choice instead (the end-of-sequence token follows them). An adapter's folder must hold its
    two files, the weights may be anything. `kill()` acts the death of the engine process, which is back
    `restart_s` later.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        step_s: float = 0.0,
        *,
        reply: Callable[[Request, int], list[int]] | None = None,
        eos_after: int | None = None,
        prefill_tokens: int = 512,
        max_num_seqs: int = 32,
        max_waiting: int = 1024,
        queue_timeout_s: float | None = None,
        max_model_len: int = 4096,
        block_size: int = 16,
        restart_s: float = 0.02,
        name: str = "fake",
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer or FakeTokenizer()
        self.on_step: StepHook | None = None
        self.submitted: list[Request] = []
        self._step_s = step_s
        self._reply = reply or self._repeat_prompt
        self._eos_after = eos_after
        self._prefill_tokens = prefill_tokens
        self._max_num_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._queue_timeout_s = queue_timeout_s
        self._block_size = block_size
        self._restart_s = restart_s
        self._info = ModelInfo(
            name=name,
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=tuple(self.tokenizer.eos_token_ids),
            dtype="none",
            device="none",
        )
        self._jobs: dict[str, _Job] = {}  # open requests, oldest first
        self._adapters: dict[str, AdapterInfo] = {}
        self._unloading: dict[str, asyncio.Event] = {}
        self._seen: set[tuple[bytes, tuple[int, ...]]] = set()
        self._stats = EngineStats()
        self._queries = self._hits = 0
        self._busy_us = self._ended_us = 0
        self._restarts = 0
        self._arrivals = 0
        self._ready = False
        self._work = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._ready = True
        self._spawn(self._loop())

    async def stop(self) -> None:
        self._ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all("the engine is stopped")

    @property
    def ready(self) -> bool:
        return self._ready

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def restarts(self) -> int:
        return self._restarts

    def submit(self, request: Request) -> UpdateStream:
        if not self._ready:
            raise EngineUnavailable("the engine is not running")
        check_request(request, self._info)
        if request.adapter and (request.adapter.id not in self._adapters or request.adapter.id in self._unloading):
            raise AdapterUnknown("the adapter is not loaded")
        started = sum(len(job.group.unfinished) for job in self._jobs.values() if job.group.started)
        waiting = [job.group.request.tenant for job in self._jobs.values() if not job.group.started]
        free = max(0, self._max_num_seqs - started)
        if queue_full(self._max_waiting, free, len(waiting), waiting.count(request.tenant)):
            raise EngineBusy("the engine's queue is full")
        self._arrivals += 1
        replies = [self._reply(request, index) for index in range(request.n)]
        job = _Job(request, self.tokenizer, replies, self._arrivals)
        self._jobs[request.id] = job
        self.submitted.append(request)
        self._work.set()
        self._expire_later(job)
        return job.stream

    def abort(self, request_id: str) -> None:
        if request_id in self._jobs:
            self._jobs[request_id].aborted = True
            self._work.set()

    def set_ceiling(self, request_id: str, tokens: int, *, final: bool) -> None:
        job = self._jobs.get(request_id)
        if job is None or job.group.ceiling is None or job.group.ceiling_final:
            return
        job.group.ceiling = max(job.group.ceiling, tokens)
        job.group.ceiling_final = final
        job.paused = job.paused and job.group.at_ceiling and not final
        self._work.set()

    async def load_adapter(self, adapter: AdapterRef) -> AdapterInfo:
        if not self._ready:
            raise EngineUnavailable("the engine is not running")
        info = _read_adapter(adapter)
        if adapter.digest and adapter.digest != info.digest:
            raise AdapterRejected("the adapter's files are not the ones that were registered")
        self._adapters[adapter.id] = info
        return info

    async def unload_adapter(self, adapter_id: str) -> None:
        if adapter_id not in self._adapters:
            return
        free = self._unloading.setdefault(adapter_id, asyncio.Event())
        if self._users(adapter_id):
            await free.wait()
        self._adapters.pop(adapter_id, None)
        self._unloading.pop(adapter_id, None)

    def kill(self) -> None:
        """Act the death of the engine process: open streams fail, and it comes back by itself."""
        self._ready = False
        self._fail_all("the engine process died")
        self._stats = EngineStats()
        self._queries = self._hits = 0
        self._busy_us = self._ended_us = 0
        self._seen.clear()
        self._spawn(self._come_back())

    # How it acts

    async def _loop(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(self._step_s)
            self._work.clear()
            if self._step():
                self._work.set()

    def _expire_later(self, job: _Job) -> None:
        own_ms = job.group.request.queue_timeout_ms
        limits_s = [self._queue_timeout_s, None if own_ms is None else own_ms / 1000]
        least_s = min((limit_s for limit_s in limits_s if limit_s is not None), default=None)
        if least_s is not None:
            asyncio.get_running_loop().call_later(least_s, self._expire, job)

    def _expire(self, job: _Job) -> None:
        job.expired = not job.group.started
        self._work.set()

    async def _come_back(self) -> None:
        await asyncio.sleep(self._restart_s)
        self._restarts += 1
        self._ready = True

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _step(self) -> bool:
        """One step for all; False when nothing was done."""
        self._admit()
        updates = [(job, update) for job in list(self._jobs.values()) if (update := self._advance(job)) is not None]
        if not updates:
            return False
        for job, update in updates:
            if update.finished:
                del self._jobs[job.group.request.id]
                self._release(job.group.request.adapter)
        self._stats = self._counted(self._stats.steps_total + 1)
        error = self._tell(StepOutput(self._stats.steps_total, [update for _, update in updates], self._stats))
        for job, update in updates:
            if error is None:
                job.stream.push(update)
            else:
                self._jobs.pop(job.group.request.id, None)
                self._release(job.group.request.adapter)
                job.stream.fail(error)
        self._stats = self._counted(self._stats.steps_total)
        return True

    def _tell(self, output: StepOutput) -> EngineUnavailable | None:
        if self.on_step is None:
            return None
        try:
            self.on_step(output)
        except Exception:
            return EngineUnavailable("the step could not be recorded")
        return None

    def _counted(self, steps: int) -> EngineStats:
        jobs = [job.group for job in self._jobs.values()]
        return EngineStats(
            running=sum(len(group.unfinished) for group in jobs if group.started),
            waiting=sum(not group.started for group in jobs),
            prefix_queries_total=self._queries,
            prefix_hits_total=self._hits,
            steps_total=steps,
            busy_us_total=self._busy_us,
            adapters_loaded=len(self._adapters),
            adapters_resident=len(self._adapters),
            ended_compute_us_total=self._ended_us,
        )

    def _admit(self) -> None:
        running = sum(len(job.group.unfinished) for job in self._jobs.values() if job.group.started)
        for job in self._jobs.values():
            group = job.group
            if group.started or job.aborted or job.expired or (group.at_ceiling and not group.ceiling_final):
                continue
            if running > 0 and running + group.request.n > self._max_num_seqs:
                return
            running += group.request.n
            group.started = True
            group.queue_us = max(0, time.monotonic_ns() // 1000 - group.arrived_us)
            # Log-probabilities of a prompt are not in a cache: it is computed.
            group.cached = group.prompt = 0 if group.prompt_logprobs is not None else self._cached(group.request)
            self._queries += len(group.request.prompt)
            self._hits += group.cached

    def _advance(self, job: _Job) -> Update | None:
        """What this step does for one request; None when it does nothing."""
        group = job.group
        done = group.prompt + group.completion
        if group.started and not group.at_ceiling:
            self._prefill(group)
        deltas = [] if group.prompt < len(group.request.prompt) or not group.started else self._decode(job)
        self._charge(group, group.prompt + group.completion - done)
        if job.expired:
            group.queue_us = time.monotonic_ns() // 1000 - group.arrived_us
            deltas = self._end(job, deltas, Finish.EXPIRED)
        elif job.aborted:
            deltas = self._end(job, deltas, Finish.ABORT)
        elif group.at_ceiling and group.ceiling_final:
            deltas = self._end(job, deltas, Finish.QUOTA)
        finished = not group.unfinished
        paused = group.at_ceiling and not finished and not job.paused
        job.paused = job.paused or paused
        counts = group.counts
        if not (deltas or finished or paused) and (not group.started or group.prompt == len(group.request.prompt)):
            return None
        return Update(
            group.request.id,
            counts,
            deltas,
            finished=finished,
            finish=group.finish if finished else None,
            queue_us=group.queue_us or 0,
            paused=paused,
            prompt_logprobs=group.take_prompt_logprobs(),
            cost=self._told(group) if finished else None,
        )

    def _charge(self, group: SequenceGroup, tokens: int) -> None:
        """Its part of the step."""
        group.compute_us += tokens * TOKEN_US
        group.kv_block_us += -(-(group.prompt + group.completion) // self._block_size) * STEP_US
        self._busy_us += tokens * TOKEN_US

    def _told(self, group: SequenceGroup) -> Cost:
        self._ended_us += group.compute_us
        return group.cost

    def _prefill(self, group: SequenceGroup) -> None:
        missing = len(group.request.prompt) - group.prompt
        group.prompt += min(missing, self._prefill_tokens)
        if missing and group.prompt == len(group.request.prompt):
            self._seen.update(self._blocks(group.request))
            if group.prompt_logprobs is not None:
                count = group.request.sampling.prompt_logprobs
                group.prompt_logprobs[1:] = [_logprob(token, count or 0, rank=1) for token in group.request.prompt[1:]]

    def _decode(self, job: _Job) -> list[ChoiceDelta]:
        deltas = []
        for sequence in job.group.unfinished:
            if job.group.at_ceiling:
                break
            token = self._next_token(job, sequence.index, sequence.num_sampled)
            sequence.tokens.append(token)
            job.group.completion += 1
            deltas.append(self._emit(job, sequence.index, token))
        return deltas

    def _emit(self, job: _Job, index: int, token: int) -> ChoiceDelta:
        sequence, text, sampling = job.group.sequences[index], job.texts[index], job.group.request.sampling
        stop_reason: int | str | None = None
        if (token in self._info.eos_token_ids and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            new = text.flush()
            sequence.finish = Finish.STOP
            stop_reason = token if token in sampling.stop_token_ids else None
        else:
            new, stop_reason = text.push(token)
            if stop_reason is not None:
                sequence.finish = Finish.STOP
            elif sequence.num_sampled == sampling.max_tokens:
                new += text.flush()
                sequence.finish = Finish.LENGTH
        return ChoiceDelta(index, [token], new, _logprobs(token, sampling.logprobs), sequence.finish, stop_reason)

    def _end(self, job: _Job, deltas: list[ChoiceDelta], finish: Finish) -> list[ChoiceDelta]:
        """End the unfinished choices, in the deltas of this step where they have one."""
        said = {delta.index: delta for delta in deltas}
        for sequence in job.group.unfinished:
            sequence.finish = finish
            delta = said.get(sequence.index, ChoiceDelta(sequence.index, [], ""))
            rest = job.texts[sequence.index].flush()
            said[sequence.index] = ChoiceDelta(
                delta.index, delta.token_ids, delta.text + rest, delta.logprobs, finish, None
            )
        return list(said.values())

    def _next_token(self, job: _Job, index: int, position: int) -> int:
        reply = job.replies[index]
        sampling = job.group.request.sampling
        ended = position >= len(reply) or (self._eos_after is not None and position >= self._eos_after)
        if ended and position >= sampling.min_tokens and not sampling.ignore_eos and self._info.eos_token_ids:
            return self._info.eos_token_ids[0]
        return reply[position % len(reply)] if reply else 0

    def _repeat_prompt(self, request: Request, index: int) -> list[int]:
        plain = [token for token in request.prompt if token not in self._info.eos_token_ids] or [0]
        return [plain[(index + i) % len(plain)] for i in range(request.sampling.max_tokens)]

    def _blocks(self, request: Request) -> list[tuple[bytes, tuple[int, ...]]]:
        """Names of the full blocks of the prompt, all but the last token's, shortest first."""
        digest = self._adapters[request.adapter.id].digest if request.adapter else ""
        root = cache_root(request.tenant, digest, request.cache_salt, public=request.public_cache)
        sizes = range(self._block_size, len(request.prompt), self._block_size)
        return [(root, tuple(request.prompt[:size])) for size in sizes]

    def _cached(self, request: Request) -> int:
        return sum(self._block_size for name in self._blocks(request) if name in self._seen)

    def _users(self, adapter_id: str) -> int:
        adapters = (job.group.request.adapter for job in self._jobs.values())
        return sum(adapter is not None and adapter.id == adapter_id for adapter in adapters)

    def _release(self, adapter: AdapterRef | None) -> None:
        if adapter and adapter.id in self._unloading and not self._users(adapter.id):
            self._unloading[adapter.id].set()

    def _fail_all(self, reason: str) -> None:
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.stream.fail(EngineUnavailable(reason))
            self._release(job.group.request.adapter)


def _logprobs(token: int, count: int | None) -> list[TokenLogprob] | None:
    return None if count is None else [_logprob(token, count)]


def _logprob(token: int, count: int, rank: int = 0) -> TokenLogprob:
    return TokenLogprob(token, -0.5, [(token + i, -0.5 - i) for i in range(count)], rank)


def _read_adapter(adapter: AdapterRef) -> AdapterInfo:
    """What stands in the folder, with the real engine's digest of it."""
    folder = Path(adapter.path)
    digest = digest_folder(folder)
    try:
        parsed = json.loads((folder / CONFIG_FILE).read_bytes())
    except ValueError:
        raise AdapterRejected(f"adapter {adapter.name!r}: {CONFIG_FILE} is not JSON") from None
    targets = parsed.get("target_modules") or []
    return AdapterInfo(
        id=adapter.id,
        digest=digest,
        rank=int(parsed.get("r", 0)),
        targets=tuple(targets) if isinstance(targets, list) else (str(targets),),
        nbytes=(folder / WEIGHTS_FILE).stat().st_size,
    )
