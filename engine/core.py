"""The engine: `step()` is schedule → run → sample → emit.

Knows: the open requests, their text and how each ends. Does not know: sockets and processes (`process`),
which sequences run (`scheduler`), where adapters are (`adapterstore`), tensors (the runner it is given, which
also samples).

Nothing happens but in a call: `add`, `abort`, `set_ceiling` and what is done with adapters take effect between two
steps, so what ends a request ends it with the counts of the last whole step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.adapterstore import AdapterRunner, AdapterStore
from engine.blocks import BlockPool, cache_root
from engine.grammarstore import GrammarStore
from engine.scheduler import Scheduled, Scheduler, StepPlan
from engine.sequence import Sequence as TokenSequence
from engine.sequence import SequenceGroup, Status, check_request
from engine.tokens import Detokenizer, Tokenizer
from engine.types import (
    AdapterInfo,
    AdapterRef,
    ChoiceDelta,
    Cost,
    EngineBusy,
    EngineConfig,
    EngineError,
    EngineStats,
    Finish,
    GrammarRejected,
    ModelInfo,
    Request,
    SamplingParams,
    StepOutput,
    TokenCounts,
    TokenLogprob,
    Update,
)

if TYPE_CHECKING:
    from engine.grammar import Matcher

log = logging.getLogger(__name__)

FAILED_STEPS_MAX = 3
"""So many steps in a row in which no sequence could be computed are the engine's fault, not a request's."""


BURST_CONTEXTS = 2
"""So many prompts as long as the context a tenant may have computed before it is a flood to others (`fairness`)."""

Said = dict[SequenceGroup, list[ChoiceDelta]]
"""The deltas of a step by request."""


class SampledToken(Protocol):
    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> TokenLogprob | None: ...


class StepRunner(AdapterRunner, Protocol):
    """What the core needs of `engine.runner.Runner`; tests give a scripted one.

    `execute` computes every entry and draws a token where `sample` is set (None elsewhere). It may be called
    again for an entry whose step failed, and then does the same. The adapters of its entries are resident.
    """

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def info(self) -> ModelInfo: ...
    def execute(self, plan: StepPlan) -> Sequence[SampledToken | None]: ...
    def copy_block(self, src: int, dst: int) -> None: ...


class TextStream(Protocol):
    """What the core needs of `engine.tokens.Detokenizer`."""

    def push(self, token_id: int) -> tuple[str, str | None]: ...
    def flush(self) -> str: ...


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class EngineCore:
    """Serves requests with a runner, one step a call. Not thread-safe."""

    def __init__(
        self,
        runner: StepRunner,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        detokenizer: Callable[[Tokenizer, SamplingParams], TextStream] = Detokenizer,
        clock_us: Callable[[], int] = monotonic_us,
    ) -> None:
        self._runner = runner
        self.tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._clock_us = clock_us
        self.grammars = GrammarStore(tokenizer, held_max=config.max_waiting)
        self.adapters = AdapterStore(
            runner,
            known_max=config.max_adapters,
            slots=config.adapter_slots,
            cache_bytes=config.adapter_cache_bytes,
        )
        longest = min(runner.info.max_model_len, runner.num_blocks * runner.block_size)
        pool = BlockPool(runner.num_blocks, runner.block_size)
        self.scheduler = Scheduler(
            pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting,
            burst=BURST_CONTEXTS * longest,
            adapters=self.adapters.slots,
        )
        self.info: ModelInfo = msgspec.structs.replace(runner.info, max_model_len=longest)
        self._queue_timeout_us = None if config.queue_timeout_s is None else round(config.queue_timeout_s * 1e6)
        self._deadlines: list[tuple[int, str]] = []  # heap of (when, request), to have begun; those that have are there
        self._texts: dict[str, list[TextStream]] = {}
        self._ended: list[Update] = []  # ended between steps, not reported yet
        self._arrivals = 0
        self._steps = 0
        self._busy_us = self._ended_compute_us = 0
        self._failed_steps = 0

    # Between steps

    def check(self, request: Request) -> str:
        """Raise the `EngineError` of a request that can never be served; else its adapter's digest ("": none)."""
        check_request(request, self.info)
        self._with_bad_words(request)
        return self.adapters.digest(request.adapter.id) if request.adapter else ""

    def add(self, request: Request, *, arrived_us: int | None = None) -> None:
        """Take a request in; raises an `EngineError` with nothing changed. `arrived_us`: when its wait began."""
        digest = self.check(request)
        if request.id in self._texts:
            raise EngineError("a request of this id is open already")
        request = self._with_bad_words(request)
        self._arrivals += 1
        group = SequenceGroup(
            request,
            arrival=self._arrivals,
            cache_root=cache_root(request.tenant, digest, request.cache_salt, public=request.public_cache),
            arrived_us=self._clock_us() if arrived_us is None else arrived_us,
        )
        texts = [self._detokenizer(self.tokenizer, request.sampling) for _ in range(request.n)]
        if self.grammars.admit(group):
            self.scheduler.add(group)
        self._texts[request.id] = texts
        self._note_deadline(group)
        if request.adapter:
            self.adapters.use(request.adapter.id)

    def _with_bad_words(self, request: Request) -> Request:
        """The request with its bad words as tokens, which is what the sampler reads."""
        words = request.sampling.bad_words
        if not words:
            return request
        try:
            ids = request.sampling.bad_words_token_ids + self.tokenizer.bad_words(words)
        except ValueError as error:
            raise EngineError(f"bad_words: {error}") from error
        return msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, bad_words_token_ids=ids)
        )

    def refuse(self, request_id: str, reason: str) -> None:
        """Report a request that `add` refused, to a caller that cannot be told by an exception."""
        update = Update(request_id, TokenCounts(), [], finished=True, finish=Finish.ERROR, error=reason, cost=Cost())
        self._ended.append(update)

    def abort(self, request_id: str) -> None:
        group = self._group(request_id)
        if group is not None:
            self._end_between_steps(group, Finish.ABORT)

    def set_ceiling(self, request_id: str, tokens: int, *, final: bool) -> None:
        group = self._group(request_id)
        if group is None:
            return
        self.scheduler.set_ceiling(group, tokens, final=final)
        if group.at_ceiling and group.ceiling_final:
            self._end_between_steps(group, Finish.QUOTA)

    def load_adapter(self, ref: AdapterRef) -> AdapterInfo:
        """Read an adapter and make it known; raises `AdapterRejected`. The same load again is answered from memory."""
        return self.adapters.load(ref)

    def unload_adapter(self, adapter_id: str) -> None:
        """Refuse it from now on; `take_unloaded` names it once its last request has ended."""
        self.adapters.unload(adapter_id)

    def take_unloaded(self) -> list[str]:
        return self.adapters.take_unloaded()

    def wait_for_adapter(self) -> bool:
        """Block until an adapter has been read from disk; False at once when none is being read."""
        if not self.adapters.reading:
            return False
        self._lose(self.adapters.collect(block=True))
        return True

    def wait_for_grammar(self) -> bool:
        """Block until a grammar has been compiled or refused; False at once when no request waits for one."""
        if not self.grammars.held:
            return False
        self._take_guided(block=True)
        return True

    @property
    def has_open(self) -> bool:
        """Whether any request is taken in and has not ended."""
        return bool(self._texts)

    def due_in_s(self) -> float | None:
        """How long until a step may have to end a request that waits, if nothing else happens; None: never."""
        if not self._deadlines:
            return None
        return max(0.0, (self._deadlines[0][0] - self._clock_us()) / 1e6)

    def check_integrity(self) -> None:
        for _ in self.checked_slices():
            pass

    def checked_slices(self) -> Iterator[None]:
        """Raise where anything contradicts itself. In slices of a few milliseconds, to be dropped before a change."""
        self.adapters.check_integrity()
        yield from self.scheduler.checked_slices()

    # The step

    def step(self) -> StepOutput | None:
        """Report what ended since the last step, else compute one; None when there is nothing to do, for now at least:
        a request may be waiting for its ceiling to be raised, its adapter to be read or its grammar to be compiled."""
        began_us = self.scheduler.now_us = self._clock_us()
        self._expire(began_us)
        self._lose(self.adapters.collect())
        self._take_guided()
        if self._ended:
            return self._report_ended()
        plan = self.scheduler.schedule()
        if self._lose(self.adapters.swap()):
            plan.scheduled = [entry for entry in plan.scheduled if entry.sequence.finish is None]
        if not plan.scheduled:
            return self._report_ended() if self._ended else None
        self._note_queue(plan, began_us)
        done, sampled, failed = self._run(plan)
        self.scheduler.now_us = self._clock_us()
        self.scheduler.commit(done, [None if token is None else token.token_id for token in sampled])
        said = self._advance_all(done, sampled)
        self._share_out(plan, self._clock_us() - began_us)
        return self._report(self._emit(said, failed))

    def _report_ended(self) -> StepOutput:
        ended, self._ended = self._ended, []
        return self._report(ended)

    def _run(self, plan: StepPlan) -> tuple[StepPlan, Sequence[SampledToken | None], list[SequenceGroup]]:
        """What was computed, what was drawn, and the requests that could not be computed."""
        for source, destination in plan.copies:
            self._runner.copy_block(source, destination)
        try:
            sampled = self._runner.execute(plan)
        except Exception:
            log.exception("a step failed; computing its sequences one by one")
            return self._run_one_by_one(plan)
        self._failed_steps = 0
        return plan, sampled, []

    def _run_one_by_one(self, plan: StepPlan) -> tuple[StepPlan, Sequence[SampledToken | None], list[SequenceGroup]]:
        """A failed step again, so that the request that fails it fails alone."""
        done: list[Scheduled] = []
        sampled: list[SampledToken | None] = []
        failed: dict[str, SequenceGroup] = {}
        for entry in plan.scheduled:
            try:
                sampled += self._runner.execute(StepPlan([entry]))
                done.append(entry)
            except Exception:
                failed[entry.sequence.request.id] = entry.sequence.group
        self._failed_steps = 0 if done else self._failed_steps + 1
        if self._failed_steps >= FAILED_STEPS_MAX:
            raise RuntimeError(f"{FAILED_STEPS_MAX} steps in a row could not be computed at all")
        return StepPlan(done), sampled, list(failed.values())

    def _advance_all(self, plan: StepPlan, sampled: Sequence[SampledToken | None]) -> Said:
        """What the step has to say for each request that it computed."""
        said: Said = {}
        for entry, token in zip(plan.scheduled, sampled, strict=True):
            group = entry.sequence.group
            deltas = said.get(group)
            if deltas is None:
                deltas = said[group] = []
            if token is not None:
                deltas.append(self._advance(entry.sequence, token))
        return said

    def _share_out(self, plan: StepPlan, busy_us: int) -> None:
        """Give each request its part of the step's time, by tokens; no microsecond is lost by rounding."""
        self._busy_us += busy_us
        total = sum(entry.count for entry in plan.scheduled)
        tokens = given_us = 0
        for entry in plan.scheduled:
            tokens += entry.count
            upto_us = busy_us * tokens // total
            entry.sequence.group.compute_us += upto_us - given_us
            given_us = upto_us

    def _emit(self, said: Said, failed: list[SequenceGroup]) -> list[Update]:
        """One update for each request that the step touched."""
        for group in failed:
            said[group] = _merged(said.get(group, []), self._end(group, Finish.ERROR))
        return [self._settle_ceiling(group, deltas) for group, deltas in said.items()]

    def _advance(self, sequence: TokenSequence, token: SampledToken) -> ChoiceDelta:
        """Add a sampled token to its choice's text, and end the choice if it ends here."""
        sampling, token_id = sequence.sampling, token.token_id
        text = self._texts[sequence.request.id][sequence.index]
        finish: Finish | None = None
        stop_reason: int | str | None = None
        if token_id in sampling.stop_token_ids and (sequence.matcher is None or sequence.matcher.stuck is None):
            new = text.push(token_id)[0] if sampling.include_stop_str_in_output else ""
            new, finish, stop_reason = new + text.flush(), Finish.STOP, token_id
        elif sequence.matcher is not None:
            new, finish, stop_reason = self._advance_guided(sequence, sequence.matcher, text, token_id)
        elif token_id in self.info.eos_token_ids and not sampling.ignore_eos:
            new, finish = text.flush(), Finish.STOP
        else:
            new, stop_reason = text.push(token_id)
            if stop_reason is not None:
                finish = Finish.STOP
            elif sequence.num_sampled >= sampling.max_tokens:
                new, finish = new + text.flush(), Finish.LENGTH
        if finish is not None:
            self._finish(sequence, finish)
        logprobs = None if token.logprob is None else [token.logprob]
        return ChoiceDelta(sequence.index, [token_id], new, logprobs, finish, stop_reason)

    def _advance_guided(
        self, sequence: TokenSequence, matcher: Matcher, text: TextStream, token_id: int
    ) -> tuple[str, Finish | None, str | None]:
        """What a token of a choice with a grammar says, and how it ends it: also where nothing may follow."""
        if token_id in self.info.eos_token_ids:
            return text.flush(), Finish.STOP if matcher.stuck is None else Finish.ERROR, None
        new, stop_string = text.push(token_id)
        matcher.accept(token_id)
        if stop_string is not None:
            return new, Finish.STOP, stop_string
        if matcher.ended:
            return new + text.flush(), Finish.STOP, None
        if matcher.stuck is not None:
            return new + text.flush(), Finish.ERROR, None
        if sequence.num_sampled >= sequence.sampling.max_tokens:
            return new + text.flush(), Finish.LENGTH, None
        return new, None, None

    def _settle_ceiling(self, group: SequenceGroup, deltas: list[ChoiceDelta]) -> Update:
        """The update of a step; at the ceiling the request ends if that is final, and pauses if not."""
        paused = group.num_open > 0 and group.at_ceiling
        if paused and group.ceiling_final:
            deltas = _merged(deltas, self._end(group, Finish.QUOTA))
            paused = False
        return self._update(group, deltas, paused=paused)

    def _update(
        self,
        group: SequenceGroup,
        deltas: list[ChoiceDelta],
        *,
        paused: bool = False,
        error: str | None = None,
        rejected: bool = False,
        adapter_lost: bool = False,
    ) -> Update:
        finished = group.num_open == 0
        finish = group.finish if finished else None
        if finished:
            self._ended_compute_us += group.compute_us
        if finish is Finish.ERROR and error is None:
            error = next((one.matcher.stuck for one in group.sequences if one.matcher and one.matcher.stuck), None)
            rejected = error is not None
        return Update(
            group.request.id,
            group.counts,
            deltas,
            finished=finished,
            finish=finish,
            error=error or "the engine could not compute this request" if finish is Finish.ERROR else None,
            queue_us=group.queue_us or 0,
            paused=paused,
            prompt_logprobs=group.take_prompt_logprobs(),
            cost=group.cost if finished else None,
            rejected=rejected,
            adapter_lost=adapter_lost,
        )

    def _report(self, updates: list[Update]) -> StepOutput:
        self._steps += 1
        scheduler = self.scheduler
        stats = EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + len(self.grammars.held),
            blocks_total=scheduler.pool.num_blocks,
            blocks_used=scheduler.pool.num_used,
            preemptions_total=scheduler.stats.preemptions,
            prefix_queries_total=scheduler.stats.prefix_queries,
            prefix_hits_total=scheduler.stats.prefix_hits,
            steps_total=self._steps,
            busy_us_total=self._busy_us,
            adapters_loaded=len(self.adapters),
            adapters_resident=self.adapters.slots.resident,
            adapter_loads_total=self.adapters.slots.loads,
            adapter_evictions_total=self.adapters.slots.evictions,
            adapter_reads_total=self.adapters.reads,
            ended_compute_us_total=self._ended_compute_us,
        )
        return StepOutput(self._steps, updates, stats)

    # The queue

    def _note_queue(self, plan: StepPlan, now_us: int) -> None:
        for entry in plan.scheduled:
            group = entry.sequence.group
            if group.queue_us is None:
                group.queue_us = max(0, now_us - group.arrived_us)

    def _note_deadline(self, group: SequenceGroup) -> None:
        own_ms = group.request.queue_timeout_ms
        limits_us = [self._queue_timeout_us, None if own_ms is None else own_ms * 1000]
        least_us = min((limit_us for limit_us in limits_us if limit_us is not None), default=None)
        if least_us is not None:
            heappush(self._deadlines, (group.arrived_us + least_us, group.request.id))
        if len(self._deadlines) > 2 * len(self._texts) + 64:  # most are of requests that have ended
            self._deadlines = [entry for entry in self._deadlines if self._waits(entry[1])]
            heapify(self._deadlines)

    def _waits(self, request_id: str) -> bool:
        group = self._group(request_id)
        return group is not None and not group.started

    def _expire(self, now_us: int) -> None:
        """End those that have waited for longer than they may."""
        while self._deadlines and self._deadlines[0][0] <= now_us:
            _, request_id = heappop(self._deadlines)
            group = self._group(request_id)
            if group is not None and not group.started:
                self._end_between_steps(group, Finish.EXPIRED)

    def _take_guided(self, *, block: bool = False) -> None:
        """Queue the requests whose grammar has come; end those whose grammar was refused."""
        for group, error in self.grammars.take_ready(block=block):
            try:
                if error is None:
                    self.scheduler.add(group)
            except EngineBusy as busy:
                error = busy
            if error is not None:
                self._end_between_steps(group, Finish.ERROR, str(error), rejected=isinstance(error, GrammarRejected))

    # Ends

    def _group(self, request_id: str) -> SequenceGroup | None:
        """An open request: the scheduler's, or one that waits for its grammar."""
        return self.scheduler.groups.get(request_id) or self.grammars.held.get(request_id)

    def _end_between_steps(
        self,
        group: SequenceGroup,
        finish: Finish,
        error: str | None = None,
        *,
        rejected: bool = False,
        adapter_lost: bool = False,
    ) -> None:
        """End it now, to be told with the next step."""
        now_us = self.scheduler.now_us = self._clock_us()
        if group.queue_us is None:
            group.queue_us = max(0, now_us - group.arrived_us)
        deltas = self._end(group, finish)
        self._ended.append(self._update(group, deltas, error=error, rejected=rejected, adapter_lost=adapter_lost))

    def _lose(self, lost: Mapping[str, str]) -> bool:
        """End the requests of adapters that are gone, each with the reason. Whether there were any."""
        if not lost:
            return False
        for group in [*self.scheduler.groups.values(), *self.grammars.held.values()]:
            adapter = group.request.adapter
            if adapter and adapter.id in lost:
                self._end_between_steps(group, Finish.ERROR, lost[adapter.id], adapter_lost=True)
        return True

    def _end(self, group: SequenceGroup, finish: Finish) -> list[ChoiceDelta]:
        """End all choices that have not ended; their held-back text is given out."""
        deltas = []
        for sequence in group.unfinished:
            rest = self._texts[group.request.id][sequence.index].flush()
            self._finish(sequence, finish)
            deltas.append(ChoiceDelta(sequence.index, [], rest, None, finish))
        return deltas

    def _finish(self, sequence: TokenSequence, finish: Finish) -> None:
        request = sequence.request
        if request.id in self.scheduler.groups:
            self.scheduler.finish(sequence, finish)
        else:  # it waited for its grammar
            sequence.finish, sequence.status = finish, Status.FINISHED
            sequence.group.num_open -= 1
        if sequence.group.num_open:
            return
        self.grammars.drop(sequence.group)
        del self._texts[request.id]
        if request.adapter:
            self.adapters.release(request.adapter.id)


def build(config: EngineConfig) -> EngineCore:
    """The core over the real runner. Raises an `EngineError` with the reason when the model cannot be served."""
    from engine.runner import Runner  # imports torch, which the core itself does without

    return EngineCore(Runner(config), Tokenizer(Path(config.model)), config)


def _merged(deltas: list[ChoiceDelta], ends: list[ChoiceDelta]) -> list[ChoiceDelta]:
    """The deltas of a step with the ends of choices in them, one delta a choice."""
    by_index = {delta.index: delta for delta in deltas}
    for end in ends:
        said = by_index.get(end.index, end)
        text = said.text + end.text if said is not end else end.text
        by_index[end.index] = ChoiceDelta(end.index, said.token_ids, text, said.logprobs, end.finish, None)
    return list(by_index.values())
