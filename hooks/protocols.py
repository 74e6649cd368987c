"""What the built objects must do: one protocol an extension point, and the few that join the stages.

Where each runs is part of its contract. *Loop*: the Trio thread, never blocks longer than 1 ms, never touches
tensors. *Compute*: the one thread that owns the model; never awaits, never touches Trio. *Worker*: a thread borrowed
for the call; may block. *Start*: before the line runs; may take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from array import array

    from torch import Tensor

    from .messages import Admit, Cancel, ChatPrompt, Delta, Park, Request, Resume, Step, StepResult
    from .program import Checkpoint, Program

# ── between the stages ────────────────────────────────────────────────────────────────────────────────────────────


class Mailbox(Protocol):
    """The bounded end of a request's line. Written by `stream`, read by whoever answers the client."""

    @property
    def last_read(self) -> float:
        """When the reader took a delta last while `parked`, in `trio.current_time()`; -inf before."""
        ...

    @property
    def closed(self) -> bool:
        """The reader has gone: the request is cancelled."""
        ...

    @property
    def failed(self) -> bool:
        """An error was put in: nothing after it counts."""
        ...

    @property
    def parked(self) -> bool:
        """The reader does not keep up."""
        ...

    def put(self, delta: Delta) -> None:
        """Never blocks and never fails; merges when full."""
        ...

    async def receive(self) -> Delta | None:
        """The next delta, waiting for it; None after the last."""
        ...

    def receive_nowait(self) -> Delta | None:
        """The next delta, or None when there is none now."""
        ...

    def close(self) -> None:
        """The reader goes."""
        ...

    def attach(self, tell: Callable[[type[Cancel] | type[Park] | type[Resume]], None]) -> None:
        """Say how to tell the line that the reader has gone, fell behind, or is back."""
        ...


class Timeline(Protocol):
    """A request is always in exactly one state; the states sum to its wall time."""

    def enter(self, state: str) -> None:
        """Leave the present state now and be in *state*."""
        ...

    def span(self, name: str, seconds: float) -> None:
        """Add to work that overlaps the states: compute, sampling, detokenizing."""
        ...

    def plugin(self, who: str, seconds: float) -> None:
        """Add to what plugin *who* (`plugin/name`) took in calls for this request, and for others in the same call."""
        ...

    def mark(self, event: str) -> None:
        """Remember when *event* (such as `first_token`) happened, the first time only."""
        ...

    def end(self) -> None:
        """The reader has taken the last delta, or has gone."""
        ...

    def since_start(self, event: str) -> float | None:
        """Seconds from the door to the mark *event*; None if it never came."""
        ...

    def report(self) -> dict[str, object]:
        """Milliseconds, for people."""
        ...

    @property
    def states(self) -> dict[str, float]:
        """Seconds in each state."""
        ...

    @property
    def spans(self) -> dict[str, float]:
        """Seconds of overlapping work."""
        ...

    @property
    def wall_s(self) -> float:
        """What the states sum to."""
        ...


class StepHandle(Protocol):
    """A step that was handed to an executor."""

    async def result(self) -> StepResult:
        """Wait for the step's second half. Cancelling the wait does not cancel the step."""
        ...


# ── the model side ────────────────────────────────────────────────────────────────────────────────────────────────


class Artifact(Struct, frozen=True, kw_only=True):
    """Where a checkpoint lies on this machine.

    Attributes:
        kind: which weight loader reads it: `gguf`, `safetensors`.
        path: the GGUF file, or the folder with `config.json`.
        name: how `/v1/models` calls it when the operator does not say.
    """

    kind: str
    path: Path
    name: str


class ModelSource(Protocol):
    """Slot `model_source`, chosen by the scheme of the model reference (`pkg:`, `file:`). Start; worker."""

    def resolve(self, reference: str, progress: Callable[[str, int, int], None]) -> Artifact:
        """Find, or bring, the checkpoint behind *reference* (without the scheme).

        Args:
            progress: called with (what, bytes done, bytes in all).

        Raises:
            ModelError: there is none; says where it looked.
        """
        ...


class WeightLoader(Protocol):
    """Slot `weight_loader`, chosen by `Artifact.kind`. Start; worker."""

    def open(self, artifact: Artifact) -> Checkpoint:
        """Read metadata and the table of tensors, no weights.

        Raises:
            ModelError: cut, corrupt, or of an unknown version or type.
        """
        ...


class Architecture(Protocol):
    """Slot `architecture`, chosen by the name in the checkpoint. A family: maps a config and names to a Program."""

    names: ClassVar[tuple[str, ...]]
    """As checkpoints call it: `llama` (GGUF), `LlamaForCausalLM` (Hugging Face)."""

    def program(self, checkpoint: Checkpoint) -> Program:
        """Write the Program. Pure; reads metadata and shapes only."""
        ...


class Linear(Protocol):
    """What a quantizer makes of one weight matrix."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` float32 → `[num_tokens, out_features]` float32. Compute."""
        ...


class Quantizer(Protocol):
    """Slot `quantizer`: how weight matrices are kept and multiplied. Start, then compute.

    Optional, looked up once:
        blocks(name, blocks, floats, bias) -> Linear | None: take over a checkpoint's own blocks
            (`core.kernels.quantized.Blocks`); *floats* is given for types other than Q4_0, Q4_1 and Q8_0. None: give
            `linear` the floats.
        bits(name, kind) -> int: of a weight, for the memory plan; *kind* is ggml's name of its type, or None.

    A `Linear` with an attribute `packed` (`core.kernels.native.pack.Packed`) or a float32 `weight` and `bias` is
    multiplied by the compiled kernels; any other one ends their segment and is called.
    """

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """Take over `[out_features, in_features]` *weight*."""
        ...


class Attention(Protocol):
    """Slot `attention`: reads and writes the paged KV cache. Compute.

    Optional, looked up once:
        kv_dtype: str = "float32". Of the pool, a name of torch's.
        kv_extra: int = 0. Numbers of that type that a head keeps of each key, and of each value, beside its features.
        native: bool = False. True: the compiled kernels know its layout and do its work.
    """

    def supports(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        window: int | None,
        softcap: float | None,
        device: str,
    ) -> str | None:
        """None, or why not."""
        ...

    def plan(self, batch: Any) -> Any:
        """Once a step: whatever `attend` needs that does not depend on the layer. *batch* is `core.kernels.Batch`."""
        ...

    def write(self, kv: Tensor, key: Tensor, value: Tensor, plan: Any) -> None:
        """Store keys and values, each `[num_tokens, num_kv_heads, head_dim]`.

        Args:
            kv: one layer of the pool, `[num_blocks, 2, num_kv_heads, block_size, head_dim + kv_extra]`, strided over
                blocks.
        """
        ...

    def attend(
        self, query: Tensor, kv: Tensor, plan: Any, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Causal attention of `[num_tokens, num_heads, head_dim]` over each row's own sequence; same shape back."""
        ...


Run = Callable[["Step"], "StepResult"]
"""What a step means. Compute: steps come in their order."""


class StepSampling(Protocol):
    """The line's own sampling, for executors: each request's processors, sampler and seed, kept by slot. Compute."""

    def begin(self, step: Step) -> array[int]:
        """Run the slot operations. Called for each step, in order, before its forward.

        Returns:
            `[num_tokens]`: `Step.tokens`, with the ids filled in that were drawn last in place of `UNKNOWN_TOKEN`.
        """
        ...

    def draw(self, step: Step, logits: Tensor, *, forward_s: float) -> StepResult:
        """Draw the tokens, after the forward.

        Args:
            logits: `[num_samples + num_scores, vocab_size]` float32: those of `Step.sample_rows`, then those of
                `Step.score_rows`. Used up: processors write into it.
            forward_s: seconds that the step has taken so far.
        """
        ...


class ExecutorContext(Struct, frozen=True, kw_only=True):
    """What an executor is built with: what its steps keep within, and what it may use.

    Attributes:
        num_slots: sequences that have sampling state at once; all slots lie below it.
        max_running: sequences that share a step, at most.
        max_step_tokens: tokens of a step, at most.
        max_model_len: tokens of a sequence, prompt and answer, at most.
        block_size: tokens of a block.
        num_blocks: `Step.block_tables` speak of blocks 1 … *num_blocks*; block 0 pads. Also where an executor has no
            blocks, sequences never hold more tokens together than these have room for.
        vocab_size: the width of the logits.
        on_thread: makes an executor of the meaning of a step: a thread that runs them in their order, which the line
            watches.
        sampling: draws as the requests ask; None where the factory says `uses_model`, whose steps end with the draw.
        load: reads the weights into Headrace's own model and gives the whole meaning of a step, the draw included. Only
            where the factory says `uses_model`; called once.
    """

    num_slots: int
    max_running: int
    max_step_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    on_thread: Callable[[Run], Executor]
    sampling: StepSampling | None
    load: Callable[[], Run]


class Executor(Protocol):
    """Slot `executor`: runs steps. The compute thread is one; a foreign engine is another.

    Built last, in a worker, with `Context.executor`; the checkpoint is closed after that.

    An attribute of the factory, looked up when it is chosen:
        uses_model: bool = False. True: steps are run by Headrace's own model, from `Context.executor.load`. Without it,
            no weights are read and no KV cache is made, and settings of that model are refused.

    Optional, looked up once:
        `__enter__`, `__exit__`: the line starts, and has ended; on the loop.
        num_blocks: int. Blocks that it can hold, where these are fewer than `Context.executor.num_blocks`: the line
            keeps within them. Not where it uses the model.
    """

    def submit(self, step: Step) -> StepHandle:
        """Take a step, on the loop, without waiting. Steps run in the order of `Step.index`."""
        ...


# ── the text side ─────────────────────────────────────────────────────────────────────────────────────────────────


class TextDecoder(Protocol):
    """Turns one growing row of tokens into text. Loop."""

    def feed(self, token_id: int) -> str:
        """The text this token completes; "" while a character is still in pieces."""
        ...

    def flush(self) -> str:
        """What is left at the end; broken bytes become U+FFFD."""
        ...


class Tokenizer(Protocol):
    """Slot `tokenizer`: comes with the weights and is never guessed."""

    num_tokens: int
    """Ids it knows. The model's embedding may have more rows."""
    bos_id: int | None
    end_ids: frozenset[int]
    """Tokens that end an answer: end of text, end of turn."""
    specials: Mapping[str, int]
    """Text of each control token → its id."""
    named_specials: Mapping[str, str]
    """What templates call some of them, such as `bos_token` → its text."""

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> array[int]:
        """Token ids of *text*. Worker: may take long, releases the GIL.

        Args:
            parse_special: control tokens written in the text count as such; else they are plain text.
            add_special: put BOS in front where the model has one.
        """
        ...

    def encode_rendered(self, rendered: Rendered) -> array[int]:
        """Token ids of a rendered conversation: markers count where the template wrote them, not where a user did."""
        ...

    def decode(self, token_ids: Iterable[int], *, skip_special: bool) -> str:
        """The whole text at once."""
        ...

    def decoder(self, *, skip_special: bool) -> TextDecoder:
        """A fresh incremental decoder."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, also where it is no whole character."""
        ...


class Rendered(Struct, frozen=True, kw_only=True):
    """A conversation as text.

    Attributes:
        text: what the template wrote, with each control token that came from a *user* replaced by its stand-in.
        stand_ins: stand-in (private-use characters that the text has nowhere else) → the user's characters.
    """

    text: str
    stand_ins: Mapping[str, str] = {}


class ChatTemplate(Protocol):
    """Slot `chat_template`: a conversation to text. Worker."""

    def render(self, prompt: ChatPrompt) -> Rendered:
        """Raises:
        BadRequest: the template refuses this conversation; the message is the template's own.
        """
        ...


class SchedulerPolicy(Protocol):
    """Slot `scheduler_policy`: pure functions over read-only views. Loop; 50 µs and 1 µs a candidate.

    A key is asked for once each time a sequence begins to wait, so it must not depend on how long it has waited since:
    whoever ages must say so by a time. `priority - (now - arrival) / age_s` orders as `priority * age_s + arrival`.
    """

    def order(self, waiting: WaitingView, now: float) -> tuple[Any, ...]:
        """Sort key: smaller starts first."""
        ...

    def victim(self, running: RunningView) -> tuple[Any, ...]:
        """Sort key: larger leaves the KV cache first."""
        ...


class WaitingView(Struct, frozen=True, gc=False):
    """A sequence that waits to start (or to start again).

    Attributes:
        arrival, deadline: of its request, in `trio.current_time()`; without a deadline `inf`.
        priority: smaller is more urgent.
        num_tokens: tokens it has, prompt and answer.
        num_left: tokens its answer may still grow by.
        turn: its place where all tenants take turns: tokens of prompt and answer that each busy tenant may use before
            it. Given once; see `core.batch.turns`.
    """

    arrival: float
    priority: int
    num_tokens: int
    num_preemptions: int
    tenant: str
    deadline: float = inf
    num_left: int = 0
    turn: float = 0.0


class RunningView(Struct, frozen=True, gc=False):
    """A sequence in the KV cache. See `WaitingView`."""

    arrival: float
    priority: int
    num_tokens: int
    num_blocks: int
    num_preemptions: int
    parked: bool
    tenant: str = ""
    deadline: float = inf
    num_left: int = 0
    turn: float = 0.0


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────────────────────

Phase = Literal["bias", "penalty", "mask", "temperature", "truncate"]
PHASES: tuple[Phase, ...] = ("bias", "penalty", "mask", "temperature", "truncate")


class SamplingContext(Struct, frozen=True, kw_only=True):
    """What a processor or sampler is built with."""

    vocab_size: int
    num_slots: int
    device: str = "cpu"


class History(Protocol):
    """Tokens of each slot, on the compute thread. Read-only to plugins."""

    def prompt(self, slot: int) -> Tensor:
        """`[num_prompt_tokens]` int64."""
        ...

    def output(self, slot: int) -> Tensor:
        """`[num_output_tokens]` int64, the last one drawn included."""
        ...

    def output_counts(self, slot: int) -> tuple[Tensor, Tensor]:
        """(distinct ids int64, how often each was drawn float32)."""
        ...

    def seen(self, slot: int) -> Tensor:
        """Distinct ids of prompt and output, int64."""
        ...


class Rows:
    """The rows of one call: row r of the logits belongs to the state in slot `slots[r]`. A row is not a request.

    Args:
        uniforms: makes the random numbers of a stream; None: there are none.
    """

    __slots__ = ("_uniforms", "history", "num_outputs", "slots")

    def __init__(
        self,
        slots: list[int],
        num_outputs: list[int],
        history: History,
        uniforms: Callable[[str], Tensor] | None = None,
    ) -> None:
        self.slots = slots
        self.num_outputs = num_outputs
        """Tokens drawn so far for each row."""
        self.history = history
        self._uniforms = uniforms

    def uniforms(self, stream: str) -> Tensor:
        """Random numbers of the component's own, `[num_rows]` float64 in [0, 1).

        Each is a pure function of (seed, choice, position, *stream*): the same alone and in company, and independent of
        the numbers that the sampler is given.

        Args:
            stream: the component's name will do.
        """
        if self._uniforms is None:
            raise RuntimeError("these rows have no random numbers; give Rows a function that makes them")
        return self._uniforms(stream)


class LogitsProcessor(Protocol):
    """Slot `logits_processor`: changes the rows it is given. Compute.

    Kept by slot: `admit` overwrites everything its last owner left, so there is nothing to remove.

    Optional, looked up once:
        check(params) -> None: called at the door, on the loop; raises BadRequest.
        lookahead: bool = True. False: needs the last id on the host before the next step is planned.
        fused: Mapping[str, str]. Which of `repetition`, `presence`, `frequency`, `temperature`, `top_k`, `top_p` and
            `min_p` it is, each with the field of its params: the compiled draw may do this processor's work, and must
            come to the same.
        speculative: bool = False. True: never reads `Rows.history`, so that it may be given rows after tokens that are
            only guessed; without it, requests that use this processor are not speculated for.
    """

    phase: ClassVar[Phase]

    def admit(self, slot: int, params: Any, admitted: Admit) -> bool:
        """Take the parameters for *slot*.

        Returns:
            False where these parameters change nothing; the slot's rows are then not passed to `apply`.
        """
        ...

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """`[num_rows, vocab_size]` float32, only rows of slots that were admitted with True; in place or new."""
        ...


class Sampler(Protocol):
    """Slot `sampler`: the draw, and only the draw. Compute. `lookahead` and `speculative` as for processors.

    Optional, looked up once:
        check(params) -> None: as for processors.
        admit(slot, params, admitted) -> None: takes the parameters for *slot*, and overwrites everything its last owner
            left there. Called once a sequence: what is kept by slot outlives preemption and parking.
    """

    def sample(self, logits: Tensor, uniforms: Tensor, rows: Rows) -> Tensor:
        """Token ids `[num_rows]` int64.

        Args:
            logits: `[num_rows, vocab_size]` float32; -inf is never drawn.
            uniforms: `[num_rows]` float64 in [0, 1), a pure function of (seed, choice, position).
        """
        ...


# ── around the line ───────────────────────────────────────────────────────────────────────────────────────────────


class Observer(Protocol):
    """Slot `observer`: is told what happened. Loop; 20 µs an event.

    Optional, looked up once:
        close() -> None: another one has taken its place. Worker; may block.
    """

    def on(self, event: Event) -> None:
        """Must tolerate kinds of events it does not know."""
        ...


class RequestEnded(Struct, frozen=True, kw_only=True):
    """A request has ended, well or not.

    Attributes:
        states, spans: seconds in each.
        wall_s: from the door to the last delta taken by the reader; what *states* sum to.
        ttft_s: to the first token; None without one.
        finish: why each choice that ended did, in the order in which they ended.
        n, max_tokens: as asked, the server's defaults filled in.
        status: HTTP status it amounts to; 499 where the client left.
        endpoint: what was asked for, by whatever road: `chat` (a conversation) or `completion` (a text or tokens).
        model: the name under which it is served.
        tenant: who asked: the name of the key; "" without keys.
    """

    id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish: tuple[str, ...]
    states: Mapping[str, float]
    spans: Mapping[str, float]
    wall_s: float
    ttft_s: float | None
    status: int
    error: str | None = None
    n: int = 1
    max_tokens: int | None = None
    endpoint: str = ""
    model: str = ""
    tenant: str = ""


class TokensDelivered(Struct, frozen=True, kw_only=True):
    """A step's tokens left for their mailboxes. *gaps_s*: for each, seconds since the choice's token before."""

    num_tokens: int
    gaps_s: tuple[float, ...]


class StepDone(Struct, frozen=True, kw_only=True):
    """A step has run."""

    index: int
    num_prefill_tokens: int
    num_decodes: int
    forward_s: float
    sample_s: float


Event = RequestEnded | TokensDelivered | StepDone


class ToolStream(Protocol):
    """One answer being split into text and calls."""

    def feed(self, text: str) -> list[Mapping[str, Any]]: ...
    def finish(self) -> list[Mapping[str, Any]]: ...


class ToolParser(Protocol):
    """Slot `tool_parser`: finds tool calls in an answer. Loop; 50 µs a chunk. Nothing in the line uses it yet."""

    def stream(self) -> ToolStream: ...


class ReasoningParser(Protocol):
    """Slot `reasoning_parser`: tells thinking from answer. Loop; 50 µs a chunk. Nothing in the line uses it yet."""

    def stream(self) -> ToolStream: ...


class Matcher(Protocol):
    """One answer's way through a grammar."""

    def fill(self, mask: Tensor) -> None: ...
    def accept(self, token_id: int) -> bool: ...


class Grammar(Protocol):
    """Slot `grammar`: compiles a constraint on answers. Worker. Nothing in the line uses it yet."""

    def compile(self, kind: str, source: str) -> Callable[[], Matcher]: ...


class StopWatcher(Protocol):
    """Watches one choice."""

    def feed(self, text: str, token_id: int) -> bool:
        """True: the answer ends here."""
        ...


class Stop(Protocol):
    """Slot `stop`: ends answers by what they say. Loop; 20 µs a token.

    Optional, looked up once:
        check(params) -> None: called at the door; raises BadRequest.
    """

    def watch(self, params: Any) -> StopWatcher | None:
        """Called when a choice has its first token; None: these parameters never end it."""
        ...


class Load(Struct, frozen=True, kw_only=True):
    """How busy the line is.

    Attributes:
        num_running, num_waiting: sequences in the KV cache, and those that want to be.
        num_blocks, num_free_blocks: of the KV cache; a block that only remembers a prefix is free.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int


class Admission(Protocol):
    """Slot `admission`: whether a request may enter. Loop; may await, ten seconds at most. An error refuses with 503.

    Optional, looked up once:
        release(request) -> None: a request that was admitted is over, or was refused by another after all. Called once.
    """

    async def admit(self, request: Request, load: Load) -> None:
        """Let *request* pass.

        Raises:
            Overloaded: not now; `retry_after_s` says when.
        """
        ...


class Auth(Protocol):
    """Slot `auth`: who asks. Loop; may await. An error, or ten seconds without an answer, refuses with 503.

    Optional, looked up once:
        scopes(tenant) -> Collection[str]: which of `infer`, `models`, `metrics` and `admin` are open to it; without it,
            all but `admin`.
    """

    async def identify(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The tenant, or None: refused.

        Args:
            headers: by lower-case name; a repeated field is one list, joined by commas.
        """
        ...


class Middleware(Protocol):
    """Slot `middleware`: a pure ASGI wrapper. Start, then loop. It stands inside authentication, around the routes."""

    def __call__(self, app: Any) -> Any:
        """The ASGI application that wraps *app*; called once."""
        ...


class Routes(Protocol):
    """Slot `routes`: further routes, mounted under `/plugins/<plugin>/`. They take the scope `infer`."""

    def routes(self) -> Sequence[Any]:
        """Starlette routes; called once."""
        ...


class Command(Protocol):
    """Slot `command`: a further subcommand of `headrace`. Its name is the component's."""

    def command(self) -> Any:
        """A `click.Command`."""
        ...


# ── building ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Context(Struct, kw_only=True):
    """What a factory is called with. Filled in while the engine is built, in this order; later fields are None before.

    Attributes:
        device: where tensors live.
        kernels: the instruction set of the compiled kernels that will run the model; None: torch will.
        block_size: tokens a block of the KV cache.
        checkpoint: the opened checkpoint.
        program: the model.
        weight_bits: what the quantizer keeps of a weight, on average.
        tokenizer: the model's.
        sampling: sizes for processors and samplers.
        executor: limits and helpers for executors.
    """

    device: str = "cpu"
    kernels: str | None = None
    block_size: int = 16
    checkpoint: Checkpoint | None = None
    program: Program | None = None
    weight_bits: float | None = None
    tokenizer: Tokenizer | None = None
    sampling: SamplingContext | None = None
    executor: ExecutorContext | None = None


# ── what plugins call ─────────────────────────────────────────────────────────────────────────────────────────────


class Register(Protocol):
    """Given to each `register_<slot>` hook; notes a factory, builds nothing."""

    def __call__(
        self,
        name: str,
        factory: Callable[..., object] | str,
        *,
        config: type[Struct] | None = None,
        params: type[Struct] | None = None,
        replaces: str | None = None,
        doc: str = "",
    ) -> None:
        """Offer *factory* under *name*.

        Args:
            factory: called as `factory(context, options)` when chosen; a string `module:attribute` is imported only
                then. *options* is an instance of *config*, or None without one.
            config: the server's settings for it; must forbid unknown fields.
            params: what a request may set; must forbid unknown fields, and every field needs a default.
            replaces: the plugin whose component of the same name this one takes over.
        """
        ...
