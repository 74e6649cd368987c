"""Decides what the next step computes: decode first, then chunks of prefill, then new arrivals as memory allows.

Pure state: no channels, no tasks, no tensors. `schedule` tells it what arrived and asks it for steps.

Blocks return when the last step that names them has come back. So a preempted sequence first *leaves*: it is planned no
more, its results in flight still count (an id once drawn is never drawn again), and then its blocks go.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from ...hooks.errors import ContextTooLong, RequestError, RequestFailed, TimedOut
from ...hooks.messages import Admit, Delta, Fork, Prompt, Release, Request, Sampled, SampledRow, Sequence, Step
from ...hooks.protocols import SchedulerPolicy
from ..containment import Account
from ..kv.blocks import BlockPool
from .draft import Draft
from .growth import Growth
from .live import Live
from .ngram import Guesser
from .pace import Pace
from .sharing import Sharing
from .turns import Turns
from .waiting import Waiting

CANDIDATES = 256
"""Waiting sequences looked at in one step; those behind them are not reached this time."""
STEP_SCORES = 64
"""Tokens of prompts scored in one step: each takes a row of logits as wide as the vocabulary."""


class Limits(Struct, frozen=True, kw_only=True):
    """What a step and the line may hold.

    Attributes:
        max_running: sequences in one step.
        max_step_tokens: tokens in one step.
        max_model_len: tokens of prompt and answer together.
        num_slots: sampling states on the compute thread; one for each sequence the credits let in.
        target_step_s: how long a step may take that computes prefill beside running streams; None: no matter.
        max_pause: the same in times a step that only decodes; None: no matter.
        start_pause_s: the same while all running streams are at their start, if that is more; None: as later.
        num_guesses: tokens guessed ahead for one sequence in one step; 0: none.
        park_timeout_s: how long a request may stay parked.
    """

    max_running: int
    max_step_tokens: int
    max_model_len: int
    num_slots: int
    prefix_cache: bool = True
    target_step_s: float | None = None
    max_pause: float | None = None
    start_pause_s: float | None = None
    num_guesses: int = 0
    park_timeout_s: float = 60.0


class Planner:
    """Owns the sequences, the free slots and the block pool.

    Args:
        end_ids: tokens that end an answer.
        on_retired: called when the line holds nothing of a request any more.
        clock: seconds.
        account: the policy's; None: one that nobody reads.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        policy: SchedulerPolicy,
        limits: Limits,
        end_ids: frozenset[int],
        on_retired: Callable[[Request], None],
        clock: Callable[[], float],
        account: Account | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.counters: Counter[str] = Counter()
        self.next_index = 0
        self.completed = -1
        self._end_ids = end_ids
        self._on_retired = on_retired
        self._clock = clock
        self._growth = Growth(pool.num_blocks, pool.block_size)
        self._sharing = Sharing(pool, enabled=limits.prefix_cache)
        self._guesser = Guesser(limits.num_guesses)
        self._lives: dict[Sequence, Live] = {}
        self._of_request: dict[Request, list[Live]] = {}
        self._running: list[Live] = []
        self._waiting = Waiting(policy, account or Account("scheduler_policy", "", ""), clock)
        self._turns = Turns()
        self._ending: list[Live] = []
        self._parked: dict[Request, float] = {}
        self._free_slots = list(range(limits.num_slots - 1, -1, -1))
        self._slot_ops: list[Admit | Fork | Release] = []
        self._num_sequences = 0
        self._pace = Pace(
            target_step_s=limits.target_step_s,
            max_pause=limits.max_pause,
            start_pause_s=limits.start_pause_s,
            least=pool.block_size,
        )

    # ── what is asked from outside ────────────────────────────────────────────────────────────────────────────────

    @property
    def num_inflight(self) -> int:
        """Steps planned and not come back."""
        return self.next_index - 1 - self.completed

    @property
    def idle(self) -> bool:
        """Nothing left to do, and nothing under way."""
        return not self._lives and not self._ending and self.num_inflight == 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def next_timeout(self) -> float:
        """When a parked request will have waited too long; `inf` when none is parked."""
        return min(map(self._expires, self._parked), default=math.inf)

    # ── what is told from outside ─────────────────────────────────────────────────────────────────────────────────

    def add(self, prompt: Prompt) -> None:
        """A request arrives: it waits from now on, or ends at once if it can never run."""
        request, tokens = prompt.request, prompt.token_ids
        if request.cancelled:
            self._on_retired(request)
            return
        room = self.pool.num_blocks * self.pool.block_size
        if len(tokens) >= min(room, self.limits.max_model_len):
            self._refuse(request, self._too_long(len(tokens), room))
            return
        left = min(room, self.limits.max_model_len) - len(tokens)
        live = Live(
            self._sequence(request, 0),
            tokens,
            num_prompt=len(tokens),
            max_tokens=min(left, request.params.max_tokens or left),
        )
        live.siblings = request.params.n - 1
        live.turn = self._turns.take(request.tenant, live.num_prompt + request.params.n * live.max_tokens)
        self._lives[live.sequence] = live
        self._of_request[request] = [live]
        self._waiting.add(live)
        if request.mailbox.parked:
            self._parked[request] = self._clock()

    def look_at(self, request: Request) -> None:
        """Something about *request* changed: it was cancelled, stopped, parked or resumed. It knows itself."""
        if request not in self._of_request:
            return
        for live in [live for live in self._of_request[request] if live.sequence in self._lives]:
            if live.sequence.unwanted:
                self._end(live)
        if request in self._of_request:
            if request.mailbox.parked:
                self._parked.setdefault(request, self._clock())
            else:
                self._parked.pop(request, None)
            self._note_state(request)

    def expire(self) -> list[Request]:
        """End the requests that were parked too long, and name them."""
        now = self._clock()
        expired = [request for request in self._parked if self._expires(request) <= now]
        for request in expired:
            self.fail(
                request,
                TimedOut(
                    f"nothing was read for {self.limits.park_timeout_s:g} s; read the stream as it comes, or raise "
                    "line.park_timeout_s"
                ),
            )
        return expired

    def _expires(self, request: Request) -> float:
        return max(self._parked[request], request.mailbox.last_read) + self.limits.park_timeout_s

    def fail(self, request: Request, error: RequestError) -> None:
        """End *request* with *error*."""
        request.mailbox.put(Delta(error=error))
        self._parked.pop(request, None)
        self._end_all(request)

    def complete(self, sampled: Sampled) -> None:
        """A step has come back."""
        self.completed = sampled.index
        self._measure(sampled)
        for row in sampled.rows:
            sequence = row.row.sequence
            live = self._lives.get(sequence)
            if live is None or row.row.epoch != sequence.epoch:
                self.counters["stale_rows"] += 1
            else:
                self._take(live, row)
        for num_kept in self._guesser.judge(sampled, self._lives):
            self.counters["kept_tokens"] += num_kept
            self.counters.update(f"kept_at_{place}" for place in range(num_kept))
        for live in [live for live in self._running if live.leaving and live.last_step <= self.completed]:
            self._preempt_now(live)
        for live in [live for live in self._ending if live.last_step <= self.completed]:
            self._ending.remove(live)
            self._return_blocks(live)

    def follow(self, policy: SchedulerPolicy, account: Account) -> None:
        """From the next step on, *policy* orders all that wait and run."""
        self._waiting.follow(policy, account)

    # ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> Step | None:
        """The next step, or None when nothing can be computed now."""
        draft = Draft(self.next_index)
        self._plan_running(draft)
        self._admit(draft)
        if not draft.num_seqs:
            return None
        slot_ops, self._slot_ops = tuple(self._slot_ops), []
        self.next_index += 1
        self.counters["steps"] += 1
        return draft.finish(slot_ops)

    def _plan_running(self, draft: Draft) -> None:
        candidates = [live for live in self._running if live.plannable]
        if len(candidates) > self.limits.max_running:
            # Who waited longest since its last step goes first, so that all get their turn.
            candidates.sort(key=lambda live: live.last_step)
            del candidates[self.limits.max_running :]
        prefills, guessing = [], []
        guess = self._guesser.wanted()
        for live in candidates:
            if live.todo > 1:
                prefills.append(live)
            elif guess and live.lookup is not None and not live.siblings:
                guessing.append(live)
            elif self._has_place(draft) and self._still_runs(live) and self._make_room(live, draft):
                draft.decode(live)
                self._planned(live, draft)
        for place, live in enumerate(guessing, 1):
            if self._has_place(draft) and self._still_runs(live) and self._make_room(live, draft):
                self._speculate(live, draft, kept=len(guessing) - place + len(prefills) + bool(self._waiting))
                self._planned(live, draft)
        for live in prefills:
            if self._has_place(draft) and self._still_runs(live):
                draft.prefill(live, self._chunk(live, draft))
                self._planned(live, draft)

    def _speculate(self, live: Live, draft: Draft, *, kept: int) -> None:
        """Plan the next token of *live*, and as many guesses as there is room for without taking it from anybody."""
        left = live.max_tokens - live.num_outputs - 1
        guesses = self._guesser.guess(live, max(0, min(left, self._budget(draft) - 1 - kept)))
        missing = self._blocks_for(live.num_computed + 1 + len(guesses)) - len(live.blocks)
        if missing > self.pool.num_free:
            guesses = guesses[: len(live.blocks) * self.pool.block_size - live.num_computed - 1]
        elif missing > 0:
            live.blocks.extend(self.pool.allocate(missing))
        if guesses:
            draft.speculate(live, guesses)
            self.counters["drafts"] += 1
            self.counters["guessed_tokens"] += len(guesses)
        else:
            draft.decode(live)

    @staticmethod
    def _still_runs(live: Live) -> bool:
        """It was not made to leave, nor ended, by what was planned before it in this step."""
        return live.running and not live.leaving

    def _has_place(self, draft: Draft) -> bool:
        if draft.num_seqs >= self.limits.max_running:
            return False
        if draft.num_tokens == draft.num_decodes:  # No target keeps one more token out.
            return draft.num_tokens < self.limits.max_step_tokens
        return self._budget(draft) > 0

    def _budget(self, draft: Draft) -> int:
        """Tokens the step has room for. Beside running streams, a step takes no longer than the target."""
        limit = self.limits.max_step_tokens
        if (room := self._pace.room(draft.num_decodes, starting=not draft.num_settled)) is not None:
            limit = min(limit, max(self.pool.block_size, draft.num_decodes + max(1, room)))
        return limit - draft.num_tokens

    def _chunk(self, live: Live, draft: Draft) -> int:
        """Tokens of its prompt that *live* computes in this step."""
        chunk = min(live.todo, self._budget(draft))
        return min(chunk, max(1, STEP_SCORES - draft.num_scores)) if live.wants_scores else chunk

    def _admit(self, draft: Draft) -> None:
        """Let the waiting in, in the policy's order, while a step has room and memory does."""
        active = sum(1 for live in self._running if not live.request.mailbox.parked)
        for live in self._waiting.first(CANDIDATES):
            if live.request.mailbox.parked or live.sequence.unwanted:
                continue
            if not self._has_place(draft) or active + 1 + live.siblings > max(
                self.limits.max_running, 1 + live.siblings
            ):
                return
            found = self._sharing.find(live)
            if self._sharing.is_on_its_way(live, len(found)):
                continue
            if not self._fits(live, found):
                return
            self._waiting.remove(live)
            self._start(live, found)
            active += 1 + live.siblings
            draft.prefill(live, self._chunk(live, draft))
            self._planned(live, draft)

    def _fits(self, live: Live, found: list[int]) -> bool:
        """Is there memory for all of its known tokens, and for what the running ones will likely grow?"""

        def fits() -> bool:
            needed = self._blocks_for(len(live.tokens)) - len(found)
            return needed + self._growth.reserve(self._running) <= self.pool.num_free_without(found)

        if fits():
            return True
        parked = [
            other for other in self._running if other.request.mailbox.parked and other.last_step <= self.completed
        ]
        for other in self._waiting.victims(parked):
            self._preempt_now(other)
            if fits():
                return True
        return False

    def _start(self, live: Live, found: list[int]) -> None:
        self.pool.share(found)
        live.blocks = array("i", found + self.pool.allocate(self._blocks_for(len(live.tokens)) - len(found)))
        live.num_computed = len(found) * self.pool.block_size
        live.num_published = len(found)
        live.running = True
        self._running.append(live)
        self._guesser.learn(live)
        self._sharing.claim(live, len(found))
        request = live.request
        if live.num_preemptions == 0:
            request.num_cached_tokens = live.num_computed
            self.counters["cached_tokens"] += live.num_computed
            self.counters["prompt_tokens"] += live.num_prompt
            self._turns.started(live.turn)
        if live.sequence.slot < 0:
            live.sequence.slot = self._free_slots.pop()
            self._slot_ops.append(
                Admit(
                    slot=live.sequence.slot,
                    choice=live.sequence.choice,
                    params=request.params,
                    chain=request.chain,
                    end_ids=self._end_ids | frozenset(request.params.stop_token_ids),
                    prompt_ids=live.tokens[: live.num_prompt],
                    output_ids=live.tokens[live.num_prompt :],
                    sampler=request.sampler,
                    stack=request.stack,
                )
            )
        self._note_state(request)

    def _planned(self, live: Live, draft: Draft) -> None:
        self._sharing.publish(live)
        if live.claims and live.todo <= 1:
            self._sharing.release(live)
        if live.siblings and live.num_inflight:
            for choice in range(1, live.siblings + 1):
                self._fork(live, choice, draft)
            live.siblings = 0

    def _fork(self, leader: Live, choice: int, draft: Draft) -> None:
        sequence = self._sequence(leader.request, choice)
        live = Live(sequence, array("i", leader.tokens), num_prompt=leader.num_prompt, max_tokens=leader.max_tokens)
        sequence.slot = self._free_slots.pop()
        live.turn = leader.turn
        live.blocks = leader.blocks[:]
        self.pool.share(live.blocks)
        live.digests = list(leader.digests)
        live.num_published = leader.num_published
        live.num_computed = leader.num_computed
        live.running = True
        self._guesser.learn(live)
        self._slot_ops.append(Fork(source=leader.sequence.slot, slot=sequence.slot, choice=choice))
        self._lives[sequence] = live
        self._of_request[leader.request].append(live)
        self._running.append(live)
        draft.fork(live)

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_room(self, live: Live, draft: Draft) -> bool:
        """A block for the next token that is its own: a new one, or a copy of one that others hold too."""
        index = live.num_computed // self.pool.block_size
        exists = index < len(live.blocks)
        if exists and self.pool.refcount(live.blocks[index]) == 1:
            return True
        if not self.pool.num_free and not self._preempt_for(live):
            return False
        (block,) = self.pool.allocate(1)
        if exists:
            draft.copy(live.blocks[index], block)
            self.pool.free([live.blocks[index]])
            live.blocks[index] = block
        else:
            live.blocks.append(block)
        return True

    def _preempt_for(self, live: Live) -> bool:
        """Make a block free for *live*. False: not in this step, or never."""
        while not self.pool.num_free:
            if self._ending or any(other.leaving for other in self._running):
                return False  # Blocks are coming with the next results.
            victim = next(iter(self._waiting.victims(self._running)))
            if victim is live and len(self._running) == 1:
                self.fail(
                    live.request,
                    RequestFailed(
                        f"the answer needs more KV cache than there is: {self.pool.num_blocks} blocks of "
                        f"{self.pool.block_size} tokens; ask for fewer tokens or raise line.kv_memory"
                    ),
                )
                return False
            if victim.last_step > self.completed:
                victim.leaving = True
                return False
            self._preempt_now(victim)
            if victim is live:
                return False
        return True

    def _preempt_now(self, live: Live) -> None:
        """Give the blocks back and wait again. The sampling state stays in its slot."""
        self.counters["preemptions"] += 1
        self._growth.preempted()
        live.leaving = False
        live.num_preemptions += 1
        live.sequence.epoch += 1
        live.num_computed = 0
        live.num_published = 0
        self._running.remove(live)
        live.running = False
        self._return_blocks(live)
        self._waiting.add(live)
        self._note_state(live.request)

    def _return_blocks(self, live: Live) -> None:
        self._sharing.release(live)
        self.pool.free(live.blocks)
        live.blocks = array("i")
        if live.sequence not in self._lives:
            if live.sequence.slot >= 0:
                self._slot_ops.append(Release(slot=live.sequence.slot))
                self._free_slots.append(live.sequence.slot)
            self._retire(live)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    # ── the life of a sequence ────────────────────────────────────────────────────────────────────────────────────

    def _sequence(self, request: Request, choice: int) -> Sequence:
        self._num_sequences += 1
        return Sequence(index=self._num_sequences, request=request, choice=choice)

    def _take(self, live: Live, row: SampledRow) -> None:
        """Note what a step brought for *live*."""
        planned = row.row
        if planned.samples and not row.num_kept:
            live.num_inflight -= 1
        if planned.num_drafts:
            # Until now it counted all guesses as right. What the wrong ones wrote will be overwritten.
            live.num_computed = planned.num_computed - planned.num_drafts + row.num_kept
        if row.error is not None:
            self.pool.forget(live.blocks)  # What it computed is not to be trusted.
            self._end_all(live.request)
            return
        unwanted = live.sequence.unwanted
        if row.token_id >= 0:
            live.tokens.append(row.token_id)
            self._guesser.extend(live)
            self.counters["generated_tokens"] += not unwanted
            if not planned.decode:
                self._note_state(live.request)
        if row.finish is not None or unwanted:
            self._growth.ended(len(live.tokens) - live.num_prompt)
            self._end(live)
        elif live.running:
            self._sharing.publish(live)

    def _end_all(self, request: Request) -> None:
        for live in [live for live in self._of_request.get(request, ()) if live.sequence in self._lives]:
            self._end(live)

    def _end(self, live: Live) -> None:
        """No further token is wanted. Its blocks return with the last step that names them."""
        del self._lives[live.sequence]
        self._sharing.release(live)
        if live.running:
            self._running.remove(live)
            live.running = False
        else:
            self._waiting.remove(live)
        if live.last_step > self.completed:
            self._ending.append(live)
        else:
            self._return_blocks(live)

    def _retire(self, live: Live) -> None:
        lives = self._of_request[live.request]
        lives.remove(live)
        if not lives:
            del self._of_request[live.request]
            unused = live.request.params.n * live.max_tokens - live.request.num_output_tokens
            self._turns.give_back(live.request.tenant, unused)
            self._parked.pop(live.request, None)
            self._on_retired(live.request)

    def _refuse(self, request: Request, error: RequestError) -> None:
        request.mailbox.put(Delta(error=error))
        self._on_retired(request)

    def _too_long(self, num_tokens: int, room: int) -> ContextTooLong:
        return ContextTooLong(
            f"the prompt must leave room for one token in the model's context of {self.limits.max_model_len} tokens "
            f"and in the KV cache of {room} tokens, found {num_tokens} tokens of prompt; shorten it"
        )

    def _note_state(self, request: Request) -> None:
        """Tell the timeline which state the request is in: that of its furthest choice."""
        lives = [live for live in self._of_request.get(request, ()) if live.sequence in self._lives]
        if not lives:
            return
        if request in self._parked:
            state = "parked"
        elif any(live.running and live.todo <= 1 and live.num_outputs > live.num_inflight for live in lives):
            state = "decode"
        elif any(live.running for live in lives):
            state = "prefill"
        else:
            state = "preempted" if any(live.num_preemptions for live in lives) else "queued"
        request.timeline.enter(state)

    def _measure(self, sampled: Sampled) -> None:
        """Keep how long steps take, for the budget beside running streams."""
        num_decodes = num_prefill = 0
        for row in sampled.rows:
            if row.row.decode:
                num_decodes += row.row.num_tokens
            else:
                num_prefill += row.row.num_tokens
        self._pace.measure(num_decodes, num_prefill, sampled.forward_s)
