"""The scheduler: which sequences run in the next step, with how many tokens each, in which blocks.

A deterministic state machine: requests and results in, plans and events out. Refuses to know clocks, kernels, text
and threads; times are numbers that it is handed. One step is out at a time: plan(), then commit() or rollback().
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from headrace.sched.foresight import Foresight
from headrace.sched.limits import check_limits, reject
from headrace.sched.order import Order, Rank
from headrace.sched.sequence import Sequence, Status
from headrace.sched.shares import share_out, sure_share
from headrace.sched.step import check_result, lay_out
from headrace.sched.tables import BlockTables
from headrace.types import (
    Event,
    Finished,
    FinishReason,
    InvariantError,
    KVGroup,
    Limits,
    Preempted,
    Rejection,
    Request,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Tokens,
)


class Scheduler:
    """Every step lets what is *computed* of a sequence catch up with what is *known*, plus drafts behind it.

    Prefill, a chunk of one, the rest behind a prefix hit, decode and verification are that one case. Sequences that
    need a single token come first, so prefill never starves a decode; then the others that run, then who waits. These
    share the rest in order: each takes half of what is left, or all that those behind it do not want. So a prompt
    alone has whole steps, the first of several has at least half of each, and the last, behind k long ones, a 2^k-th.
    """

    def __init__(
        self, limits: Limits, groups: tuple[KVGroup, ...], order: Order, *, has_prefix_cache: bool = True
    ) -> None:
        check_limits(limits, groups)
        self._limits = limits
        self._order = order
        self._tables = BlockTables(groups, limits, is_caching=has_prefix_cache)
        self._context = min(limits.max_len, self._tables.max_tokens)
        self._sequences: dict[int, Sequence] = {}  # waiting and running, by request id
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self._flight: list[Sequence] = []  # of the step that is out, in the order of its slices
        self._foresight = Foresight()
        self._events: list[Event] = []  # what plan() decided, told with the next events
        self._step = 0
        self._num_arrivals = 0
        self._num_releases = 0  # times that blocks were given back
        self._batch_end: Rank = (0, -1)  # the last member of the batch, for an order that forms batches

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        """Per group: nobody's, though they may still hold a prefix."""
        return self._tables.num_free

    @property
    def num_cached_blocks(self) -> tuple[int, ...]:
        """Per group: can be shared, whether somebody uses them now or not."""
        return self._tables.num_sealed

    # Requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request) -> Rejection | None:
        """Let `request` wait for its turn, or say why that turn could never come."""
        if request.id in self._sequences:
            raise InvariantError(f"request {request.id} was added twice")
        if (rejection := reject(request, self._limits, self._context)) is not None:
            return rejection
        max_tokens = request.params.max_tokens
        num_prompt = len(request.prompt)
        max_total = self._context if max_tokens is None else min(self._context, num_prompt + max_tokens)
        rank = self._order.rank(request, self._num_arrivals)
        self._num_arrivals += 1
        seq = Sequence.of(request, rank, max_total, len(self._limits.num_blocks))
        self._sequences[request.id] = seq
        insort(self._waiting, seq, key=_rank)
        return None

    def cancel(self, request_id: int) -> list[Event]:
        """End a request in whatever state it is; of one that has ended already nothing is said.

        If a step is out with a slice of it, the slice's result is dropped and the blocks are freed when it is back.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            return []
        _remove(self._running if seq.status is Status.RUNNING else self._waiting, seq)
        events = self._take_events()
        events.append(self._finish(seq, FinishReason.CANCELLED))
        return events

    def _finish(self, seq: Sequence, reason: FinishReason, message: str = "") -> Finished:
        seq.status = Status.FINISHED
        del self._sequences[seq.request.id]
        if not seq.num_in_flight:
            self._release(seq)
        return Finished(seq.request.id, reason, seq.usage(), message)

    def _release(self, seq: Sequence) -> None:
        self._tables.release(seq)
        self._num_releases += 1

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Planning -------------------------------------------------------------------------------------------------

    def plan(self, now_us: int, drafts: Mapping[int, SequenceOf[int]] | None = None) -> StepPlan | None:
        """The next step, or None if there is nothing to do. `drafts` by request id ride where there is room for them.

        Preemptions decided here are told with the events of the next commit() or cancel().
        """
        if self._flight:
            raise InvariantError(f"step {self._step} is still out")
        if not self._sequences:
            return None
        if not (drafts or self._waiting) and (foreseen := self._foresight.come_true(self._running)) is not None:
            for seq in self._running:
                self._schedule(seq, 1)
            self._step = foreseen.step
            return foreseen
        self._make_room()
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self._running:
            if seq.num_computed < seq.num_slots:
                (decodes if seq.num_remaining == 1 else prefills).append(seq)
        self._plan_decodes(decodes, drafts or {}, self._limits.max_step_tokens - len(decodes) - len(prefills))
        budget = self._prompt_budget(decodes, len(prefills))
        if self._waiting:
            self._admit(prefills, budget, now_us)
        if prefills:
            self._plan_prefills(prefills, budget)
        if not self._flight:
            raise InvariantError(f"step {self._step}: {len(self._sequences)} requests, and none can run")
        self._step += 1
        return self._foresight.note(lay_out(self._step, self._flight, len(self._limits.num_blocks)))

    def foresee(self) -> StepPlan | None:
        """What the next plan() gives if every slice that is out draws a token and nothing else happens: this very
        object, then with the tokens in it. None where more is needed to tell. Changes no plan.
        """
        if self._waiting or len(self._flight) != len(self._running) or self._tables.is_windowed:
            return None
        return self._foresight.foresee(self._flight)

    def _prompt_budget(self, decodes: list[Sequence], num_prefills: int) -> int:
        """What prompts may take of the step. Who decodes waits for the whole step, so beside them it is kept short."""
        budget = self._limits.max_step_tokens - sum([seq.num_in_flight for seq in decodes])
        if not decodes or self._limits.max_chunk_tokens is None:
            return budget
        return min(budget, max(self._limits.max_chunk_tokens, num_prefills))

    def _make_room(self) -> None:
        """Give running sequences a slot for their next token, in order.

        The last in order gives way to any other. If it is itself without a slot, it keeps what it has and waits, so
        nothing is computed twice that no one had to make room for. The first in order always gets its slot.
        """
        for seq in self._running:  # shrinks at its end on the way
            if seq.num_computed < seq.num_slots:
                continue
            while not self._tables.min_free() and seq is not self._running[-1]:
                self._preempt(self._running[-1])
            if self._tables.min_free():
                self._tables.grow(seq, seq.num_computed + 1)

    def _plan_decodes(self, decodes: list[Sequence], drafts: Mapping[int, SequenceOf[int]], spare: int) -> None:
        """Schedule the sequences that need one token; drafts take no more than the `spare` tokens of the budget.

        There is a token for each of them: nobody is let in before all who run have theirs, and one more is left.
        """
        for seq in decodes:
            num_drafts = 0
            if drafts and (drafted := drafts.get(seq.request.id)):
                num_drafts = min(len(drafted), self._max_drafts(seq, spare))
                seq.drafts = array("i", drafted[:num_drafts])
                spare -= num_drafts
            self._schedule(seq, 1 + num_drafts)

    def _max_drafts(self, seq: Sequence, spare: int) -> int:
        """Drafts that can ride with `seq`: they take blocks that are free, and preempt nobody."""
        num_slots = self._tables.room(seq, self._tables.min_free()) - 1
        return max(0, min(self._limits.lookahead, spare, num_slots, seq.max_total - len(seq.tokens) - 1))

    def _plan_prefills(self, prefills: list[Sequence], budget: int) -> None:
        """Share `budget` out among `prefills`, in order. There is a slot and a token for each, so all get on."""
        for seq, count in zip(prefills, share_out(budget, self._tables.claims(prefills, budget)), strict=True):
            self._schedule(seq, count)

    def _schedule(self, seq: Sequence, count: int) -> None:
        end = seq.num_computed + count
        if end > seq.num_slots:
            self._tables.grow(seq, end)
        seq.num_in_flight = count
        self._flight.append(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Take the blocks of `seq` back; it waits in its place in the order, and computes again what it knows."""
        _remove(self._running, seq)
        insort(self._waiting, seq, key=_rank)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self._events.append(Preempted(seq.request.id, seq.num_computed))
        self._release(seq)

    # Admission ------------------------------------------------------------------------------------------------

    def _admit(self, prefills: list[Sequence], budget: int, now_us: int) -> None:
        """Let in who waits, in order, up to the first for whom there is no room: nobody overtakes it. Who is let in
        joins `prefills`, as long as those before it are sure to leave it something of `budget`. Who is led is
        passed over, but no more of them than could run: 1,024 who share a prefix cost a plan no more than 64.

        There is room if the free blocks hold all that a sequence knows, though it may take them over many steps, all
        that those who prefill have still to take, and a block more for each that runs to grow by. So a prompt preempts
        nobody, and who was preempted does not come back too early: in a pool half as large as 64 sequences would like,
        a block each cuts what is computed twice from 33 % to 9 % and costs 2 % more steps; two blocks each, 4 % and
        6 %.
        """
        max_seqs = self._limits.max_seqs
        if self._order.is_batched:
            self._form_batch()
        for seq in prefills:
            budget -= sure_share(seq.num_wanted, budget)
        leaders = [seq for seq in (*self._flight, *prefills) if seq.num_computed < seq.num_prompt]
        num_led = 0
        while num_led < min(len(self._waiting), max_seqs) and budget and len(self._running) < max_seqs:
            seq = self._waiting[num_led]
            if self._order.is_batched and seq.rank > self._batch_end:
                return
            if self._tables.is_led(seq, leaders):
                num_led += 1
                continue
            if not self._let_in(seq, prefills):
                return
            if seq.scheduled_us is None:
                seq.scheduled_us, seq.num_cached = now_us, seq.num_computed
            budget -= sure_share(seq.num_wanted, budget)
            prefills.append(seq)
            leaders.append(seq)

    def _form_batch(self) -> None:
        """If the batch has wholly ended, the next one is who waits now, as many as may run at once."""
        if not self._running and self._waiting[0].rank > self._batch_end:
            self._batch_end = self._waiting[: self._limits.max_seqs][-1].rank

    def _let_in(self, seq: Sequence, prefills: list[Sequence]) -> bool:
        """Move `seq` from waiting to running behind the longest prefix it can share, with a slot for its next token,
        if there are blocks for the rest beside what `prefills`, who run, have still to take.

        Once refused, it is not looked at again before blocks came back or its next block was sealed by another: its
        prompt, however long, is not walked through in every step.
        """
        if seq.refused_at == self._num_releases and not (
            seq.refused_hit < self._tables.max_hit(seq) and self._tables.has_sealed(seq, seq.refused_hit)
        ):
            return False
        num_hit = self._tables.longest_hit(seq)
        if not self._tables.has_room(seq, num_hit, len(self._running), prefills):
            seq.refused_at, seq.refused_hit = self._num_releases, num_hit
            return False
        _remove(self._waiting, seq)
        insort(self._running, seq, key=_rank)
        seq.status = Status.RUNNING
        self._tables.share(seq, num_hit)
        self._tables.grow(seq, seq.num_computed + 1)
        return True

    # What came of it ------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Event]:
        """Take in the result of the step that is out: the only place where what is computed moves on.

        Raises InvariantError, and changes nothing, if the result has not the shape of the plan.
        """
        flight = self._flight
        self._check_out(result.step)
        check_result(flight, result)
        self._flight = []
        events = self._take_events()
        offsets = result.token_offsets
        for s, seq in enumerate(flight):
            if seq.status is Status.FINISHED:
                self._land(seq)
                continue
            drawn = result.tokens[offsets[s] : offsets[s + 1]]
            self._commit_slice(seq, drawn, result.logprobs[s], result.prompt_logprobs[s], events)
        return events

    def rollback(self, step: int) -> None:
        """The step that is out failed: nothing of it is computed or sealed, all its slices can be planned again."""
        self._check_out(step)
        flight, self._flight = self._flight, []
        for seq in flight:
            self._land(seq)

    def _check_out(self, step: int) -> None:
        if not self._flight or step != self._step:
            raise InvariantError(f"step {step} is not out; the last one planned is {self._step}")

    def _land(self, seq: Sequence) -> None:
        seq.num_in_flight = 0
        if seq.drafts:
            seq.drafts = array("i")
        if seq.status is Status.FINISHED:
            self._release(seq)

    def _commit_slice(
        self,
        seq: Sequence,
        drawn: array[int],
        logprobs: tuple[TokenLogprobs, ...] | None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None,
        events: list[Event],
    ) -> None:
        num_known = len(seq.tokens)
        if seq.is_scoring:
            seq.num_scored = max(seq.num_scored, seq.scored_positions.stop)
        if drawn:
            # All but the last token drawn were fed, as drafts. Rejected drafts left slots behind, to be written again.
            reason = seq.accept(drawn)
            seq.num_computed = min(num_known + len(drawn) - 1, len(seq.tokens))
        else:
            seq.num_computed += seq.num_in_flight
            reason = FinishReason.LENGTH if seq.num_computed == seq.max_total else None
        self._land(seq)
        if reason is not FinishReason.ERROR:  # what led to no token at all is shared with nobody
            self._tables.seal(seq)
        num_new = len(seq.tokens) - num_known
        if num_new or prompt_logprobs:
            kept = logprobs if logprobs is None else logprobs[:num_new]
            events.append(Tokens(seq.request.id, drawn[:num_new], kept, prompt_logprobs))
        if reason is not None:
            _remove(self._running, seq)
            message = f"no token could be drawn at position {len(seq.tokens)}" if reason is FinishReason.ERROR else ""
            events.append(self._finish(seq, reason, message))
        elif self._tables.drop_past(seq):
            self._num_releases += 1

    # Invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError if the scheduler contradicts itself."""
        ended = [seq for seq in self._flight if seq.status is Status.FINISHED]
        self._tables.check([*self._running, *ended])
        for queue, status in ((self._waiting, Status.WAITING), (self._running, Status.RUNNING)):
            _require(queue == sorted(queue, key=_rank), f"the {status.value} sequences are out of order")
            _require(all(seq.status is status for seq in queue), f"not all in {status.value} are {status.value}")
        max_running = min(self._limits.max_seqs, self._limits.max_step_tokens)
        _require(len(self._running) <= max_running, f"{len(self._running)} sequences run at once")
        known = {seq.request.id: seq for seq in (*self._waiting, *self._running)}
        _require(known == self._sequences, "the sequences are not those that wait or run")
        _require(all(not any(seq.tables) for seq in self._waiting), "a sequence that waits holds blocks")
        for seq in self._running:
            _require(seq.num_computed < len(seq.tokens) <= seq.max_total, f"request {seq.request.id} should have ended")
        in_flight = [seq for seq in self._running if seq.num_in_flight]
        _require(in_flight == sorted(set(self._flight) - set(ended), key=_rank), "the flight is not what is in flight")
        _require(sum(seq.num_in_flight for seq in self._flight) <= self._limits.max_step_tokens, "a step is too large")


def _require(is_true: bool, message: str) -> None:
    if not is_true:
        raise InvariantError(message)


def _rank(seq: Sequence) -> Rank:
    return seq.rank


def _remove(queue: list[Sequence], seq: Sequence) -> None:
    """Take `seq` out of a queue by rank."""
    del queue[bisect_left(queue, seq.rank, key=_rank)]
