"""How many tokens a word is to a server, so that prompts are as long as was asked for.

Asks the server's own tokenizer where it has a route for it, and keeps only words that are one token each; else, what
two requests used. What stands around a prompt, such as its template, is known from what a request used.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

from msgspec import Struct

from ...hooks.errors import StartError
from .answer import Answer
from .target import Prompt, Target

# Short and common, so one token each for most tokenizers. Whatever else they are does not matter.
_WORDS: Final = """
able about above across add after again age ago air all alone along also always among and animal answer any area arm
around art ask away back bad bag ball bank base bed before begin best better between big bird black blood blue board
boat body book both box boy bread bridge bring brother build burn business but buy call camp can car card care carry
case cat catch cause cell center change check child choose church circle city class clean clear clock close cloud coat
cold color come common cook cool copy corner cost count country course cover cross cup cut dance dark day deal dear
deep dinner do doctor dog door down draw dream dress drink drive drop dry ear early earth east easy eat edge egg end
enough even evening every eye face fact fair fall family farm fast father fear feel few field fight fill film find
fine fire first fish five floor flower fly follow food foot for form four free fresh friend from front fruit full game
garden gate get girl give glass go gold good grass great green ground group grow gun hair half hall hand happy hard
hat have head hear heart heat heavy help here high hill hold home horse hot hotel hour house how ice idea inside iron
island job join just keep key kind king kitchen know lady lake land large last late laugh law lead leaf learn leave
left leg less letter level life light line lip list little live long look lot love low machine main make man many map
mark market master matter maybe meat meet metal middle milk mind money month moon more morning mother mouth move
"""
WORDS: Final = tuple(_WORDS.split())
NUM_WORDS: Final = (24, 72)
"""In the requests that gauge."""
MAX_COUNTS: Final = 64
MIN_KEPT: Final = 64
"""With fewer words, prompts would begin alike."""

Count = Callable[[str], Awaitable[int | None]]


class Gauge(Struct, frozen=True, kw_only=True):
    """What a word is worth.

    Attributes:
        num_words: there are to choose from.
        source: `tokenize`: words were counted by the server's tokenizer; `usage`: by what requests used; `guess`: by
            nobody, for the server tells neither.
        overhead: tokens around a prompt.
    """

    num_words: int = len(WORDS)
    tokens_per_word: float = 1.0
    overhead: int = 0
    source: Literal["tokenize", "usage", "guess"] = "guess"

    def words_of(self, num_tokens: int) -> int:
        """How many words so many tokens are."""
        return max(0, round(num_tokens / self.tokens_per_word))


async def measure(target: Target, run_id: str) -> tuple[tuple[str, ...], Gauge]:
    """Find out, with one or two requests of one token each; so it is known as well that the server answers.

    Returns:
        The words to use, and what each is worth.

    Raises:
        StartError: it does not.
    """
    words = await single_tokens(target.count, WORDS)
    kept, low = words or WORDS, NUM_WORDS[0]
    used = await _ask(target, run_id, kept, low)
    if used is None:
        return kept, Gauge(num_words=len(kept), source="tokenize" if words else "guess")
    if words:
        return kept, Gauge(num_words=len(kept), overhead=used - low, source="tokenize")
    high = NUM_WORDS[1]
    more = await _ask(target, run_id, kept, high)
    rate = (more - used) / (high - low) if more else 0.0
    if rate <= 0:
        return kept, Gauge()
    return kept, Gauge(tokens_per_word=rate, overhead=round(used - rate * low), source="usage")


async def single_tokens(count: Count, words: Sequence[str]) -> tuple[str, ...]:
    """Those of *words* that are one token, found by halving; none where the server does not tell, or few are."""
    kept: list[str] = []
    left = [tuple(words)]
    for _ in range(MAX_COUNTS):
        if not left:
            return tuple(kept) if len(kept) >= MIN_KEPT else ()
        some = left.pop()
        num_tokens = await count(" ".join(some))
        if num_tokens is None:
            return ()
        if num_tokens == len(some):
            kept += some
        elif len(some) > 1:
            half = len(some) // 2
            left += [some[half:], some[:half]]
    return ()


async def _ask(target: Target, run_id: str, words: Sequence[str], num_words: int) -> int | None:
    """Tokens that a prompt of so many words used."""
    chosen = random.Random(f"{run_id}/gauge/{num_words}").choices(words, k=num_words)
    prompt = Prompt(head=" ".join(chosen[:4]), text=" ".join(chosen[4:]), num_output_tokens=1)
    _, answer = await target.ask(target.encode(prompt))
    if answer.error == "http 400" and target.takes_system:
        # Some templates know no system message.
        target.takes_system = False
        _, answer = await target.ask(target.encode(prompt))
    return _used(answer)


def _used(answer: Answer) -> int | None:
    # One token may have no text, which is no reason not to begin.
    if answer.error not in (None, "empty"):
        raise StartError(f"the server must answer a first request of one token: {answer.error}: {answer.message}")
    return answer.usage.prompt_tokens if answer.usage is not None else None
