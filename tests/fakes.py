"""A line without a model: real actors, real planner, real block pool, an executor that knows what it should find.

`FakeExecutor` keeps, in place of keys and values, the token at each place of the KV cache. What it draws next depends
on every token it reads back through a sequence's block table, so one wrong block, copy, slot or position shows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar
from zlib import crc32

import trio

from headrace.core.batch.planner import Limits
from headrace.core.engine import Engine, ModelInfo, Parts
from headrace.core.kv.blocks import BlockPool
from headrace.hooks.components import Bound
from headrace.hooks.errors import RequestError, RequestFailed
from headrace.hooks.messages import UNKNOWN_TOKEN, Admit, ChatPrompt, Fork, Step, StepResult, TokenPrompt
from headrace.hooks.protocols import Executor, Rendered
from headrace.hooks.settings import Line, Settings
from headrace.hooks.stack import Stack
from headrace.plugins.fcfs import FirstComeFirstServed

T = TypeVar("T")

VOCAB_SIZE = 1000
END_ID = 999
NAN_ID = 998
"""A prompt that ends with it gets an error in place of its first token."""


class NumberTokenizer:
    """Token 17 is the text `17 `, and nothing is special but the end."""

    num_tokens = VOCAB_SIZE
    bos_id = None
    end_ids = frozenset({END_ID})
    specials: Mapping[str, int] = {}
    named_specials: Mapping[str, str] = {}

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> array[int]:
        return array("i", (int(word) for word in text.split()))

    def encode_rendered(self, rendered: Rendered) -> array[int]:
        return self.encode(rendered.text, parse_special=True, add_special=False)

    def decode(self, token_ids: Iterable[int], *, skip_special: bool) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)

    def decoder(self, *, skip_special: bool) -> NumberDecoder:
        return NumberDecoder()

    def token_bytes(self, token_id: int) -> bytes:
        return b"%d " % token_id


class NumberDecoder:
    def feed(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""


class JoinTemplate:
    def render(self, prompt: ChatPrompt) -> Rendered:
        return Rendered(text=" ".join(str(message["content"]) for message in prompt.messages))


def next_token(tokens: Sequence[int], choice: int = 0, seed: int = 0) -> int:
    """What the fake model says after *tokens*: a checksum of all of them, never an end or NaN token."""
    return (crc32(array("i", tokens).tobytes()) + choice * 7919 + seed) % (VOCAB_SIZE - 2)


def counting(tokens: Sequence[int], choice: int = 0, seed: int = 0) -> int:
    """A gentler model: the next number."""
    return (tokens[-1] + 1) % (VOCAB_SIZE - 2)


Model = Callable[[Sequence[int], int, int], int]


def answer(
    prompt: Sequence[int], num_tokens: int, choice: int = 0, seed: int = 0, model: Model = next_token
) -> list[int]:
    """What a request gets that nobody disturbs."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(model(tokens, choice, seed))
    return tokens[len(prompt) :]


def humming(tokens: Sequence[int], choice: int = 0, seed: int = 0) -> int:
    """A model that mostly repeats itself: it goes round in sevens, and every now and then slips."""
    slip = crc32(array("i", tokens).tobytes()) % 10 == 0
    return (tokens[-1] + 1 + slip + choice) % 7


class FakeSampler:
    speculative = True


class _Slot:
    def __init__(self, admit: Admit) -> None:
        self.choice = admit.choice
        self.seed = admit.params.seed or 0
        self.tokens = [*admit.prompt_ids, *admit.output_ids]


class FakeHandle:
    def __init__(self, result: Callable[[], StepResult], done_at: float) -> None:
        self._result = result
        self._done_at = done_at
        self._value: StepResult | None = None

    async def result(self) -> StepResult:
        await trio.sleep_until(self._done_at)
        if self._value is None:
            self._value = self._result()
        return self._value


class FakeExecutor:
    """Runs steps on Trio's clock: each takes *step_s* after the one before."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        step_s: float = 0.01,
        model: Model = next_token,
        fail_at: int | None = None,
    ) -> None:
        self._size = pool.block_size
        self._kv = [[-1] * pool.block_size for _ in range(pool.num_blocks + 1)]
        self._slots: dict[int, _Slot] = {}
        self._step_s = step_s
        self._model = model
        self._fail_at = fail_at
        self._free_at = 0.0
        self.steps: list[Step] = []
        """The last hundred, for tests that look at what was planned."""

    def submit(self, step: Step) -> FakeHandle:
        self.steps.append(step)
        del self.steps[:-100]
        self._free_at = max(self._free_at, trio.current_time()) + self._step_s
        result = self.run(step)
        return FakeHandle(lambda: result, self._free_at)

    def run(self, step: Step) -> StepResult:
        if step.index == self._fail_at:
            raise RuntimeError(f"step {step.index} failed on purpose")
        self._operate(step)
        self._copy(step)
        contexts = self._write(step)
        token_ids: list[int] = []
        errors: dict[int, RequestError] = {}
        for i, slot in enumerate(step.sample_slots):
            if step.sample_drafts[i] >= 0 and token_ids[-1] != step.sample_drafts[i]:
                token_ids.append(-1)
                continue
            context = contexts[step.sample_rows[i]]
            state = self._slots[slot]
            assert context == state.tokens, f"slot {slot} holds {state.tokens}, its blocks hold {context}"
            assert step.sample_positions[i] >= 0
            token_id = self._model(context, state.choice, state.seed)
            if context[-1] == NAN_ID:
                errors[i] = RequestFailed("the model's logits are NaN")
            state.tokens.append(token_id)
            token_ids.append(token_id)
        return StepResult(token_ids=token_ids, logprobs={}, errors=errors, forward_s=self._step_s, sample_s=0.0)

    def _operate(self, step: Step) -> None:
        for op in step.slot_ops:
            if isinstance(op, Admit):
                self._slots[op.slot] = _Slot(op)
            elif isinstance(op, Fork):
                source = self._slots[op.source]
                copy = self._slots[op.slot] = object.__new__(_Slot)
                copy.choice, copy.seed, copy.tokens = op.choice, source.seed, list(source.tokens)
            else:
                del self._slots[op.slot]

    def _copy(self, step: Step) -> None:
        for source, target in zip(step.block_copies[::2], step.block_copies[1::2], strict=True):
            self._kv[target] = list(self._kv[source])

    def _write(self, step: Step) -> dict[int, list[int]]:
        """Write the step's tokens, then read back, for each token, all that its row can see."""
        tables = []
        for i, slot in enumerate(step.slots):
            table = step.block_tables[step.cu_blocks[i] : step.cu_blocks[i + 1]]
            for place in range(step.cu_tokens[i], step.cu_tokens[i + 1]):
                token, position = step.tokens[place], step.positions[place]
                if token == UNKNOWN_TOKEN:
                    token = self._slots[slot].tokens[-1]
                self._kv[table[position // self._size]][position % self._size] = token
            tables.append(table)
        contexts = {}
        for i, table in enumerate(tables):
            assert step.seq_lens[i] == step.positions[step.cu_tokens[i + 1] - 1] + 1
            for place in range(step.cu_tokens[i], step.cu_tokens[i + 1]):
                length = step.positions[place] + 1
                contexts[place] = [self._kv[table[p // self._size]][p % self._size] for p in range(length)]
        return contexts

    @property
    def num_slots_held(self) -> int:
        return len(self._slots)


async def inline(function: Callable[[], T], /) -> T:
    """In place of a worker thread, which a test clock does not see."""
    await trio.lowlevel.checkpoint()
    return function()


def bound(name: str, component: object) -> Bound:
    return Bound(name=name, plugin="fake", component=component, params=None)


def make_stack() -> Stack:
    return Stack(
        tokenizer=bound("numbers", NumberTokenizer()),
        chat_template=bound("join", JoinTemplate()),
        policy=bound("fcfs", FirstComeFirstServed()),
        chain=(),
        sampler=bound("none", FakeSampler()),
        observers=(),
        fingerprint="fake",
    )


def make_parts(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_running: int = 8,
    max_waiting: int = 64,
    max_step_tokens: int = 32,
    max_model_len: int = 200,
    park_timeout_s: float = 60.0,
    executor: Callable[[BlockPool], Executor] = FakeExecutor,
    **limits: object,
) -> Parts:
    pool = BlockPool(num_blocks, block_size)
    built = executor(pool)

    @contextmanager
    def running() -> Iterator[Executor]:
        yield built

    return Parts(
        info=ModelInfo(name="fake", max_model_len=max_model_len, vocab_size=VOCAB_SIZE, created=0, fingerprint="fake"),
        stack=make_stack(),
        pool=pool,
        limits=Limits(
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            num_slots=max_running + max_waiting,
            park_timeout_s=park_timeout_s,
            **limits,  # type: ignore[arg-type]
        ),
        executor=running(),
        end_ids=frozenset({END_ID}),
        max_token_bytes=4,
        defaults={},
        off_loop=inline,
    )


def make_engine(parts: Parts, *, mailbox_deltas: int = 64) -> Engine:
    return Engine(Settings(line=Line(mailbox_deltas=mailbox_deltas)), parts=parts)


async def ask(
    engine: Engine, prompt: Sequence[int], params: Mapping[str, object] | None = None, **rest: object
) -> dict[int, str]:
    """Submit a request, read it to its end, and give each choice's text.

    Raises:
        RequestError: what it ended with.
    """
    request = engine.request(TokenPrompt(token_ids=tuple(prompt)), {"seed": 0, **(params or {})}, **rest)  # type: ignore[arg-type]
    texts = dict.fromkeys(range(request.params.n), "")
    try:
        await engine.submit(request)
        while (delta := await engine.receive(request)) is not None:
            if delta.error is not None:
                raise delta.error
            texts[delta.choice] += delta.text
    finally:
        engine.close(request)
    return texts


def text_of(token_ids: Iterable[int]) -> str:
    return NumberTokenizer().decode(token_ids, skip_special=True)
