"""The vocabulary of the line: what the stages say to each other, and nothing else.

    Request ─▶ Prompt ─▶ Step ─▶ Logits ─▶ Sampled ─▶ Delta        Cancel · Park · Resume · Drain

Messages are frozen. What lives as long as a request does (its mailbox, its timeline, whether it was cancelled) is not
a message: a message carries a reference to the `Request`, and the `Request` is the truth.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

if TYPE_CHECKING:
    from .components import Bound
    from .errors import RequestError
    from .params import SamplingParams
    from .protocols import Mailbox, StepHandle, Timeline
    from .stack import Stack

UNKNOWN_TOKEN = -1
"""In `Step.tokens`: the id drawn for this slot by the step before, which only the compute thread knows yet."""


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


# ── what a client asks ────────────────────────────────────────────────────────────────────────────────────────────


class ChatPrompt(Struct, frozen=True, kw_only=True):
    """A conversation, to be rendered by the model's chat template.

    Attributes:
        messages: each with `role` and `content`, as the template sees them: content is a string, never None.
        add_generation_prompt: open the assistant's turn at the end.
        continue_final_message: leave the last message open and go on in it. Excludes the former.
        template_kwargs: further names for the template.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = {}


class TextPrompt(Struct, frozen=True, kw_only=True):
    """Plain text. With *parse_special*, control tokens written in it count as such; BOS is added where there is one."""

    text: str
    parse_special: bool = True


class TokenPrompt(Struct, frozen=True, kw_only=True):
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


class Request:
    """One request on its way; the same object from the door to the last delta.

    Attributes:
        id: unique in this process, such as `chatcmpl-…`.
        prompt: what to answer.
        params: how to draw and when to end, with the server's defaults filled in and the seed settled.
        chain: one parameter struct (or None: not used) for each logits processor of the Stack, in its order.
        sampler: the sampler's parameters.
        stack: what it was resolved on. It stays there to its end, whatever is installed meanwhile.
        stops: stop watchers besides the stop strings, each with its parameters.
        mailbox: where deltas go. Its reader closing it cancels the request.
        timeline: which state the request is in; states add up to wall time.
        lookahead: False where a step may not be planned before the last token's id is known on the host.
        speculate: whether tokens may be guessed ahead: nothing in its chain looks at the tokens drawn before.
        priority: smaller is served first, where the scheduler policy looks at it.
        arrival: when it came to the door, in `trio.current_time()`.
        deadline: in `trio.current_time()`; `inf` without one.
        patience_s: how long it may wait at the door for a place in the line; 0: refused at once.
        tenant: whose prefix cache this request shares; "" is everybody's.

    The rest is filled in on the way: what it holds of the line, and what its last delta will report.
    """

    __slots__ = (
        "admitted_by",
        "arrival",
        "chain",
        "control_pending",
        "credit_tokens",
        "deadline",
        "finish",
        "id",
        "lookahead",
        "mailbox",
        "num_cached_tokens",
        "num_finished",
        "num_output_tokens",
        "num_prompt_tokens",
        "params",
        "patience_s",
        "priority",
        "prompt",
        "prompt_ids",
        "prompt_scores",
        "retired",
        "sampler",
        "speculate",
        "stack",
        "stopped",
        "stops",
        "tenant",
        "timeline",
    )

    def __init__(
        self,
        *,
        id: str,
        prompt: ChatPrompt | TextPrompt | TokenPrompt,
        params: SamplingParams,
        chain: tuple[Struct | None, ...],
        mailbox: Mailbox,
        timeline: Timeline,
        arrival: float = 0.0,
        lookahead: bool = True,
        speculate: bool = False,
        priority: int = 0,
        deadline: float = float("inf"),
        patience_s: float = 0.0,
        tenant: str = "",
        sampler: Struct | None = None,
        stops: tuple[tuple[Bound, Struct], ...] = (),
        stack: Stack | None = None,
    ) -> None:
        self.id = id
        self.prompt = prompt
        self.params = params
        self.chain = chain
        self.mailbox = mailbox
        self.timeline = timeline
        self.arrival = arrival
        self.lookahead = lookahead
        self.speculate = speculate
        self.priority = priority
        self.deadline = deadline
        self.patience_s = patience_s
        self.tenant = tenant
        self.sampler = sampler
        self.stops = stops
        self.stack = stack
        self.admitted_by: list[Bound] = []
        """Admission components that let it in and have not been told of its end."""
        self.stopped: set[int] = set()
        """Choices whose text reached a stop string: their tokens after it are not wanted."""
        self.control_pending = False
        """A control message about this request is under way; a second would say nothing new."""
        self.retired = False
        """The line holds nothing of it any more: no block, no slot, no place in a queue."""
        self.credit_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_finished = 0
        self.finish: list[str] = []
        """Why each choice that has ended did."""
        self.prompt_ids = array("i")
        """The prompt as tokens, where its ids or log-probabilities were asked for."""
        self.prompt_scores: list[TokenLogprobs] = []
        """Of each token of the prompt but the first, where asked for; complete before the first delta."""

    @property
    def cancelled(self) -> bool:
        """No further token is wanted: the reader has gone, or was told of an error. Every stage looks at it."""
        return self.mailbox.closed or self.mailbox.failed

    def __repr__(self) -> str:
        return f"<Request {self.id}{' cancelled' if self.cancelled else ''}>"


class Sequence:
    """One choice of a request: a row of tokens that grows. Compared by identity.

    Attributes:
        index: unique in this process and ascending in order of arrival.
        choice: 0 … n - 1.
        slot: the sampling state it owns on the compute thread, from its first step to its end; -1 before.
        epoch: counts its stays in the KV cache; rows of an older stay are stale.
        answer: what `stream` keeps of its text on the way out, and nobody else looks at.
    """

    __slots__ = ("__weakref__", "answer", "choice", "epoch", "index", "request", "slot")

    def __init__(self, *, index: int, request: Request, choice: int) -> None:
        self.index = index
        self.request = request
        self.choice = choice
        self.slot = -1
        self.epoch = 0
        self.answer: Any = None

    @property
    def unwanted(self) -> bool:
        """Cancelled as a whole, or this choice reached a stop string."""
        request = self.request
        mailbox = request.mailbox  # As `Request.cancelled`; every stage asks this of every row.
        return mailbox.closed or mailbox.failed or self.choice in request.stopped

    def __repr__(self) -> str:
        return f"<Sequence {self.index} {self.request.id}[{self.choice}] slot {self.slot} epoch {self.epoch}>"


# ── down the line ─────────────────────────────────────────────────────────────────────────────────────────────────


class Prompt(Struct, frozen=True, kw_only=True):
    """tokenize → schedule: the request as token ids (`array("i")`), at least one."""

    request: Request
    token_ids: array[int]


class Admit(Struct, frozen=True, kw_only=True):
    """Slot operation: from this step on, *slot* holds this sequence's sampling state and nothing of its last owner.

    Attributes:
        chain, sampler, stack: see `Request`. Without a stack, it is the first one.
        end_ids: tokens that end the answer (the model's and the request's own); what `min_tokens` forbids.
        prompt_ids, output_ids: the tokens so far.
    """

    slot: int
    choice: int
    params: SamplingParams
    chain: tuple[Struct | None, ...]
    end_ids: frozenset[int]
    prompt_ids: array[int]
    output_ids: array[int]
    sampler: Struct | None = None
    stack: Stack | None = None


class Fork(Struct, frozen=True, kw_only=True):
    """Slot operation: *slot* becomes a copy of *source*, but draws as *choice*."""

    source: int
    slot: int
    choice: int


class Release(Struct, frozen=True, kw_only=True):
    """Slot operation: nobody owns *slot* any more."""

    slot: int


class Row(Struct, frozen=True, kw_only=True):
    """Whose a sampled row, or a chunk of prefill, is. Host side only; the compute thread sees the arrays of `Step`.

    Attributes:
        num_tokens: tokens this step computes for the sequence; 0 for a further choice drawn from another one's row.
        num_computed: tokens in the KV cache when the step has run.
        samples: whether a token is drawn; the order of such rows is the order of `Step.sample_slots`.
        output_index: which token of the answer that is, counted from 0.
        max_tokens: tokens the answer may have; the finish rule by length.
        decode: False while the prompt is being computed.
        num_drafts: of the tokens, those at the end that were guessed. Each has a sample row of its own.
        num_scores: tokens of the prompt whose log-probabilities the step gives, in the order of `Step.score_rows`.
    """

    sequence: Sequence
    epoch: int
    num_tokens: int
    num_computed: int
    samples: bool
    output_index: int
    max_tokens: int
    decode: bool
    num_drafts: int = 0
    num_scores: int = 0


class Step(Struct, frozen=True, kw_only=True):
    """schedule → forward: one pass of the model over a ragged batch, as flat int32 arrays, decode rows first.

    Sequence i of the batch owns tokens `cu_tokens[i]:cu_tokens[i + 1]` and blocks `cu_blocks[i]:cu_blocks[i + 1]`.

    Attributes:
        index: steps run in this order, whatever order tasks wake in. Counted from 0.
        slot_ops: run in order before the forward.
        block_copies: `[2 · num_copies]`, (source, target) pairs, copied before the forward.
        tokens: `[num_tokens]`; `UNKNOWN_TOKEN` means the id the step before drew for the sequence's slot.
        positions: `[num_tokens]`, counted from the start of each sequence.
        slots: `[num_seqs]`, whose sampling state to take unknown tokens from.
        seq_lens: `[num_seqs]`, tokens in the KV cache after this step.
        block_tables: `[cu_blocks[-1]]`, block ids; token p of a sequence lies in block p // block_size.
        sample_rows: `[num_samples]`, indices into tokens whose logits are wanted.
        sample_slots: `[num_samples]`, whose sampling state draws from that row. Many slots may share a row.
        sample_positions: `[num_samples]`, number of tokens already drawn for the slot: the draw's counter.
        sample_drafts: `[num_samples]`, -1, or the guessed token in that row: what is drawn there counts only where the
            row before, of the same slot, counts and drew just this token.
        num_decodes: how many of the sequences, from the front, compute exactly one token each.
        rows: the same on the host side, in the order of the batch.
        score_rows: `[num_scores]`, indices into tokens whose logits say how likely a known token was; nothing is drawn.
        score_tokens: `[num_scores]`, those known tokens: of a prompt, one place further.
        score_tops: `[num_scores]`, alternatives to report for each.
    """

    index: int
    slot_ops: tuple[Admit | Fork | Release, ...]
    block_copies: array[int]
    tokens: array[int]
    positions: array[int]
    slots: array[int]
    seq_lens: array[int]
    cu_tokens: array[int]
    cu_blocks: array[int]
    block_tables: array[int]
    sample_rows: array[int]
    sample_slots: array[int]
    sample_positions: array[int]
    sample_drafts: array[int]
    num_decodes: int
    rows: tuple[Row, ...]
    score_rows: array[int] = field(default_factory=lambda: array("i"))
    score_tokens: array[int] = field(default_factory=lambda: array("i"))
    score_tops: array[int] = field(default_factory=lambda: array("i"))


class Logits(Struct, frozen=True, kw_only=True):
    """forward → sample: a step that the executor has; *handle* gives what it drew."""

    step: Step
    handle: StepHandle


class TokenLogprobs(Struct, frozen=True, kw_only=True):
    """Natural logarithms for one token, under the model's own distribution: before penalties and temperature.

    Attributes:
        rank: 1 for the likeliest token; told of tokens of a prompt only.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    rank: int | None = None


class PluginTime(Struct, frozen=True, kw_only=True):
    """What one call of a logits processor or a sampler took.

    Attributes:
        who: `plugin/name`.
        slots: whose rows it was called for.
    """

    who: str
    seconds: float
    slots: frozenset[int]


class StepResult(Struct, frozen=True, kw_only=True):
    """What the executor gives back for one step.

    Attributes:
        token_ids: `[num_samples]`, in the order of `Step.sample_slots`; -1 where *errors* has the row, and where a
            guess before it was wrong.
        logprobs: sample index → its log-probabilities, for slots that asked for them.
        errors: sample index → why that row has no token (NaN logits, a plugin that failed).
        forward_s, sample_s: seconds, measured on the compute thread.
        scores: in the order of `Step.score_rows`.
        plugins: the calls of *sample_s*, one by one.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, RequestError]
    forward_s: float
    sample_s: float
    scores: list[TokenLogprobs] = []
    plugins: tuple[PluginTime, ...] = ()


class SampledRow(Struct, frozen=True, kw_only=True):
    """What one row of a step came to.

    Attributes:
        token_id: the token drawn; -1 for a chunk of prefill that draws none, or with *error*.
        finish: the choice ends with this token.
        num_kept: guessed tokens of the row that stand before this one.
        scores: of tokens of the prompt, in order.
    """

    row: Row
    token_id: int = -1
    num_kept: int = 0
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    error: RequestError | None = None
    scores: tuple[TokenLogprobs, ...] = ()


class Sampled(Struct, frozen=True, kw_only=True):
    """sample → schedule and stream: a step is done. *plugins*: see `StepResult`."""

    index: int
    rows: tuple[SampledRow, ...]
    forward_s: float
    sample_s: float
    plugins: tuple[PluginTime, ...] = ()


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of one request. *cached* ones are part of *prompt*."""

    prompt: int
    completion: int
    cached: int


class Delta(Struct, frozen=True, kw_only=True):
    """stream → mailbox: what is new in one choice of an answer.

    Attributes:
        text: whole characters only; may be empty.
        token_ids: the tokens behind it, where the request asked for ids or log-probabilities.
        logprobs: one for each of them, where it asked for those.
        finish: set once a choice, in its last delta.
        usage: set in the last delta of the whole request.
        error: the request ends here, with this and without usage.
    """

    choice: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_tokens: int = 0
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: RequestError | None = None


# ── control ───────────────────────────────────────────────────────────────────────────────────────────────────────
# At most one of the first three is under way a request: each only says "look at the request again".


class Cancel(Struct, frozen=True):
    """→ schedule: the request, or some of its choices, is no longer wanted."""

    request: Request


class Park(Struct, frozen=True):
    """mailbox → schedule: the reader does not keep up; leave the batch, keep the blocks."""

    request: Request


class Resume(Struct, frozen=True):
    """mailbox → schedule: the reader is back."""

    request: Request


class Drain(Struct, frozen=True):
    """engine → schedule: finish what runs, then close the outboxes."""
