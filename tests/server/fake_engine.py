"""An engine without a model: the same face, deterministic words, and switches to hold, fail, or be in any state."""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Mapping

import msgspec
import trio

from headrace.core.channel import ChannelStatistics
from headrace.core.codec import Codec
from headrace.core.containment import Account, PluginCost
from headrace.core.engine import DrainReport, EngineStatistics, ModelInfo
from headrace.core.mailbox import Mailbox
from headrace.core.timeline import Timeline
from headrace.hooks.errors import BadRequest, EngineDied, RequestError, Unavailable
from headrace.hooks.messages import (
    ChatPrompt,
    Delta,
    FinishReason,
    Request,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
    Usage,
)
from headrace.hooks.params import SamplingParams
from headrace.hooks.protocols import Rendered

INFO = ModelInfo(name="fake", max_model_len=128, vocab_size=1000, created=1700000000, fingerprint="fp_fake")
END_ID = 2
EMOJI_ID = 999


def word(token_id: int) -> str:
    return f" w{token_id}"


class WordTokenizer:
    """` w17` is token 17, other words are 500 and more, and a text that is to have specials begins with 998, `<s>`."""

    bos_id = 998

    def encode(self, text, *, parse_special, add_special) -> array:
        ids = [int(part[1:]) if part[1:].isdecimal() else 500 + len(part) for part in text.split()]
        return array("i", [*([self.bos_id] if add_special else []), *ids])

    def encode_rendered(self, rendered) -> array:
        return self.encode(rendered.text, parse_special=True, add_special=False)

    def decode(self, token_ids, *, skip_special) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode()

    def token_bytes(self, token_id) -> bytes:
        return b"<s>" if token_id == self.bos_id else word(token_id).encode()


class RoleTemplate:
    """`role: content` a line; a user's `#` is a control token that must not count."""

    def render(self, prompt) -> Rendered:
        if prompt.template_kwargs.get("refuse"):
            raise BadRequest("the template refuses")
        lines = [f"{message['role']}: {message['content']}" for message in prompt.messages]
        if prompt.add_generation_prompt:
            lines.append("assistant:")
        return Rendered(text="\n".join(lines).replace("#", "\ue000"), stand_ins={"\ue000": "#"})


async def inline(function):
    await trio.lowlevel.checkpoint()
    return function()


class FakeEngine:
    """Answers every prompt of k words with w1 w2 …, up to max_tokens.

    Attributes:
        hold_at: index of the token before which every request waits for `release`.
        fail_at: index of the token at which a request fails with `failure`.
        refusal: what `submit` raises.
        max_sequences: see `Engine`.
        num_cached: tokens of each prompt that it says were cached.
        report_ms: what `timings` gives.
        top_offset: which token after the drawn one is the first of the likeliest.
        closed: what each request was closed with.
        num_put: tokens put into mailboxes so far.
    """

    def __init__(self, *, state: str = "ready") -> None:
        self.state = state
        self.info = INFO if state != "loading" else None
        self.defaults: Mapping[str, object] = {}
        self.ready = trio.Event()
        self.report = "a plan"
        self.hold_at = math.inf
        self.release = trio.Event()
        self.held = trio.Event()
        self.fail_at = math.inf
        self.failure: RequestError = RequestError("it broke")
        self.refusal: RequestError | None = None
        self.mailbox_deltas = 64
        self.max_sequences = 70
        self.num_cached = 0
        self.report_ms: dict[str, object] = {"prefill_ms": 1.5}
        self.top_offset = 0
        self.codec = Codec(
            WordTokenizer(),
            RoleTemplate(),
            accounts=(Account("tokenizer", "words", "words"), Account("chat_template", "roles", "roles")),
            off_loop=inline,
            max_model_len=INFO.max_model_len,
            max_bytes=1000,
            vocab_size=INFO.vocab_size,
        )
        self.loaded = trio.Event()
        self.loaded.set()
        self.requests: list[Request] = []
        self.closed: dict[str, tuple[int, str | None]] = {}
        self.changed = trio.lowlevel.ParkingLot()
        self.num_put = 0
        self.prompts: list[object] = []
        self.params: list[dict[str, object]] = []
        self.calls: list[dict[str, object]] = []
        self.word = word
        self._live: dict[Request, None] = {}
        self._stop = trio.Event()
        self._dead: str | None = None

    # ── the engine's face ─────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, *, progress=None) -> None:
        await self.loaded.wait()
        if self.state == "loading":
            self.state, self.info = "ready", INFO
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.ready.set()
            await self._stop.wait()
            nursery.cancel_scope.cancel()
        if self._dead is not None:
            raise EngineDied(self._dead)

    def request(
        self,
        prompt,
        params,
        *,
        id=None,
        extra=None,
        priority=0,
        timeout_s=None,
        patience_s=0.0,
        tenant="",
        sampler=None,
        stop=None,
    ) -> Request:
        if self.state != "ready":
            raise Unavailable("not ready", retry_after_s=5)
        asked = {"seed": 1, **self.defaults, **params}
        try:
            settled = msgspec.convert(asked, SamplingParams)
        except msgspec.ValidationError as error:
            raise BadRequest(str(error)) from None
        if any(not 0 <= token_id < INFO.vocab_size for token_id in settled.logit_bias):
            raise BadRequest("logit_bias: unknown id", param="logit_bias")
        self.prompts.append(prompt)
        self.params.append(dict(params))
        self.calls.append({"extra": extra, "priority": priority, "timeout_s": timeout_s, "patience_s": patience_s})
        self.calls[-1] |= {name: asked for name, asked in (("sampler", sampler), ("stop", stop)) if asked}
        request = Request(
            id=id or secrets.token_hex(4),
            prompt=prompt,
            params=settled,
            chain=(),
            mailbox=Mailbox(max_deltas=self.mailbox_deltas, num_choices=settled.n),
            timeline=Timeline(),
            arrival=trio.current_time(),
            priority=priority,
        )
        self.requests.append(request)
        self._live[request] = None
        return request

    async def submit(self, request: Request) -> None:
        await trio.lowlevel.checkpoint()
        if self.refusal is not None:
            raise self.refusal
        self._nursery.start_soon(self._generate, request)

    async def receive(self, request: Request) -> Delta | None:
        return await request.mailbox.receive()

    def receive_nowait(self, request: Request) -> Delta | None:
        return request.mailbox.receive_nowait()

    def timings(self, request: Request) -> dict[str, object]:
        return self.report_ms

    def close(self, request: Request, *, status: int = 200, error: str | None = None) -> dict[str, object]:
        self.closed[request.id] = (status, error)
        self._live.pop(request, None)
        request.mailbox.close()
        self.changed.unpark_all()
        return self.timings(request)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        if token_id == WordTokenizer.bos_id and self.word is word:
            return "<s>", b"<s>"
        data = "🦜".encode()[:2] if token_id == EMOJI_ID else self.word(token_id).encode()
        return data.decode("utf-8", "replace"), data

    def statistics(self) -> EngineStatistics:
        channel = ChannelStatistics(name="forward", depth=1, capacity=2, num_messages=3, wait_s=0.5, blocked_s=0.25)
        return EngineStatistics(
            channels=(channel,),
            running=len(self._live),
            waiting=0,
            parked=0,
            blocks_total=8,
            blocks_used=3,
            slots_total=4,
            slots_used=1,
            preemptions_total=2,
            steps_total=5,
            prompt_tokens_total=6,
            cached_tokens_total=1,
            generated_tokens_total=self.num_put,
            guessed_tokens_total=0,
            kept_tokens_total=0,
            kept_by_position=(0, 0),
            plugins=(PluginCost(plugin="acme", slot="sampler", seconds=0.25, calls=4, errors=1, quarantined=1),),
        )

    async def drain(self, budget_s: float) -> DrainReport:
        self.state = "draining"
        num_live = len(self._live)
        with trio.move_on_after(budget_s):
            while self._live:
                await self.changed.park()
        cut = len(self._live)
        self._tell_all(Unavailable("the server is shutting down", retry_after_s=10))
        self._stop.set()
        return DrainReport(finished=num_live - cut, cut=cut)

    # ── for tests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def die(self, reason: str) -> None:
        self.state = "dead"
        self._dead = reason
        self._tell_all(Unavailable(reason))
        self._stop.set()

    async def wait_closed(self, num_requests: int) -> list[tuple[int, str | None]]:
        """Wait until so many requests have been closed."""
        with trio.fail_after(10):
            while len(self.closed) < num_requests:
                await self.changed.park()
        return list(self.closed.values())

    def _tell_all(self, error: RequestError) -> None:
        for request in self._live:
            request.mailbox.put(Delta(error=error))

    async def _generate(self, request: Request) -> None:
        params = request.params
        forced = max(params.logit_bias, key=params.logit_bias.get, default=None)
        num_tokens = min(params.max_tokens or 8, INFO.max_model_len)
        request.num_prompt_tokens, request.num_cached_tokens = count_words(request.prompt), self.num_cached
        usage = Usage(prompt=request.num_prompt_tokens, completion=num_tokens * params.n, cached=self.num_cached)
        if params.return_token_ids or params.prompt_logprobs is not None:
            request.prompt_ids = await self._ids(request.prompt)
        if params.prompt_logprobs is not None:
            request.prompt_scores = [scores(id, params.prompt_logprobs, 1, rank=7) for id in request.prompt_ids[1:]]
        for index in range(num_tokens):
            if index == self.hold_at:
                self.held.set()
                await self.release.wait()
            else:
                await trio.lowlevel.checkpoint()
            if index == self.fail_at:
                request.mailbox.put(Delta(error=self.failure))
                return
            ended = forced == END_ID
            for choice in range(params.n):
                last = ended or index == num_tokens - 1
                self.put(request, choice, index + 1 if forced is None else forced, last, usage)
            if ended:
                return

    def put(self, request: Request, choice: int, token_id: int, last: bool, usage: Usage) -> None:
        params, ended = request.params, token_id == END_ID and END_ID in request.params.logit_bias
        finish = (FinishReason.STOP if ended else FinishReason.LENGTH) if last else None
        logprobs = None if params.logprobs is None else scores(token_id, params.logprobs, self.top_offset)
        request.mailbox.put(
            Delta(
                choice=choice,
                text="" if ended else self.word(token_id),
                token_ids=(token_id,) if logprobs or params.return_token_ids else (),
                logprobs=(logprobs,) if logprobs else (),
                num_tokens=1,
                finish=finish,
                usage=usage if last and choice == params.n - 1 else None,
            )
        )
        self.num_put += 1

    async def _ids(self, prompt: object) -> array:
        return array("i", prompt.token_ids) if isinstance(prompt, TokenPrompt) else await self.codec.encode(prompt)


def scores(token_id: int, num_tops: int, offset: int, rank: int | None = None) -> TokenLogprobs:
    """A token that cannot be, and the likeliest ones, which begin *offset* after it in the vocabulary."""
    tops = tuple(range(token_id + offset, token_id + offset + num_tops))
    return TokenLogprobs(logprob=-math.inf, top_ids=tops, top_logprobs=(-0.5,) * num_tops, rank=rank)


def count_words(prompt: object) -> int:
    match prompt:
        case ChatPrompt(messages=messages):
            return sum(len(message["content"].split()) for message in messages)
        case TextPrompt(text=text):
            return len(text.split())
    return len(prompt.token_ids)
