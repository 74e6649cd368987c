"""The contract of the slot `grammar`: what a mask allows is what may come, and what may come is what was asked for.

`Matcher.fill` is given `[vocab_size]` bool and sets it to True where a token may come next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..errors import BadRequest
from ..protocols import Context
from .contract import Contract, ensure, skip
from .letters import Letters

MAX_FOLLOWED = 200
"""Tokens of a random answer that are followed."""


class GrammarContract(Contract):
    """Compiles constraints, and follows answers through them. Its tokens are the bytes of UTF-8, unless overridden.

    Attributes:
        accepts: (kind, source, answer) where the answer conforms, and may end there.
        rejects: (kind, source, answer) where it does not.
        malformed: (kind, source) that must be refused.
    """

    slot = "grammar"
    accepts: ClassVar[Sequence[tuple[str, str, str]]] = ()
    rejects: ClassVar[Sequence[tuple[str, str, str]]] = ()
    malformed: ClassVar[Sequence[tuple[str, str]]] = ()

    def context(self) -> Context:
        return Context(tokenizer=Letters())

    def compiled(self, kind: str, source: str) -> Callable[[], Any]:
        """What makes matchers."""
        made: Callable[[], Any] = self.build(self._words).compile(kind, source)
        return made

    @property
    def _words(self) -> Context:
        context = self.context()
        ensure(context.tokenizer is not None, "context() must have a tokenizer")
        return context

    def ids(self, answer: str) -> list[int]:
        """The tokens of *answer*."""
        tokenizer = self._words.tokenizer
        assert tokenizer is not None
        return list(tokenizer.encode(answer, parse_special=False, add_special=False))

    def allowed(self, matcher: Any) -> Tensor:
        """`[vocab_size]` bool: what may come next."""
        tokenizer = self._words.tokenizer
        assert tokenizer is not None
        mask = torch.zeros(tokenizer.num_tokens, dtype=torch.bool)
        matcher.fill(mask)
        return mask

    def test_answers_that_conform_are_accepted(self) -> None:
        """Token by token, each of them in the mask; at the end, an end token is too."""
        self._need_examples()
        tokenizer = self._words.tokenizer
        assert tokenizer is not None
        for kind, source, answer in self.accepts:
            matcher = self.compiled(kind, source)()
            for place, token_id in enumerate(self.ids(answer)):
                name = f"token {place} of {answer!r}"
                ensure(self.allowed(matcher)[token_id], f"{name} must be in the mask of {source!r}")
                ensure(matcher.accept(token_id) is True, f"accept must return True for {name}")
            ends = [self.allowed(matcher)[token_id] for token_id in tokenizer.end_ids]
            ensure(any(ends), f"after {answer!r} an end token must be in the mask of {source!r}")

    def test_answers_that_do_not_conform_are_rejected(self) -> None:
        """Somewhere, at the latest at their end."""
        self._need_examples()
        tokenizer = self._words.tokenizer
        assert tokenizer is not None
        for kind, source, answer in self.rejects:
            matcher = self.compiled(kind, source)()
            conforms = all(self.allowed(matcher)[each] and matcher.accept(each) for each in self.ids(answer))
            ends = conforms and any(self.allowed(matcher)[each] for each in tokenizer.end_ids)
            ensure(not ends, f"{answer!r} must not conform to {source!r}")

    def test_mask_and_accept_agree(self) -> None:
        """For every token: else one would be drawn that is then refused."""
        self._need_examples()

        def check(which: int, length: int) -> None:
            kind, source, answer = self.accepts[which % len(self.accepts)]
            make, before = self.compiled(kind, source), self.ids(answer)[:length]

            def there() -> Any:
                matcher = make()
                for token_id in before:
                    matcher.accept(token_id)
                return matcher

            for token_id, allowed in enumerate(self.allowed(there()).tolist()):
                said = there().accept(token_id)
                ensure(said is allowed, f"accept({token_id}) must return {allowed}, as the mask says, found {said!r}")

        self.for_all(st.integers(0, 20), st.integers(0, 10), check=check)

    def test_fill_says_all_of_the_mask(self) -> None:
        """Whatever stood in it before, and as often as it is asked."""
        self._need_examples()
        for kind, source, answer in self.accepts:
            matcher = self.compiled(kind, source)()
            for token_id in self.ids(answer):
                first = self.allowed(matcher)
                full = torch.ones_like(first)
                matcher.fill(full)
                ensure(torch.equal(first, full), "fill must set every element of the mask, and change no state")
                matcher.accept(token_id)

    def test_something_may_always_come(self) -> None:
        """Along any way that the masks allow, up to an end token."""
        self._need_examples()
        tokenizer = self._words.tokenizer
        assert tokenizer is not None
        ends = tokenizer.end_ids

        def check(which: int, random: Any) -> None:
            kind, source, _ = self.accepts[which % len(self.accepts)]
            matcher = self.compiled(kind, source)()
            for _ in range(MAX_FOLLOWED):
                ids = self.allowed(matcher).nonzero()[:, 0].tolist()
                ensure(ids, f"the mask of {source!r} must never be empty before the end")
                token_id = random.choice(ids)
                if token_id in ends:
                    return
                matcher.accept(token_id)

        self.for_all(st.integers(0, 20), st.randoms(use_true_random=False), check=check)

    def test_two_answers_at_once_do_not_mix(self) -> None:
        self._need_examples()
        for kind, source, answer in self.accepts:
            make = self.compiled(kind, source)
            first, second = make(), make()
            fresh = self.allowed(make())
            for token_id in self.ids(answer):
                first.accept(token_id)
            ensure(torch.equal(self.allowed(second), fresh), "a matcher must not move when another one does")

    def test_what_cannot_be_compiled_is_a_bad_request(self) -> None:
        for kind, source in [("no such kind", "x"), *self.malformed]:
            try:
                self.compiled(kind, source)
            except BadRequest:
                continue
            except Exception as error:
                ensure(False, f"compile must raise BadRequest alone, found {type(error).__name__}: {error}")
            ensure(False, f"{source!r} of the kind {kind!r} must be refused with BadRequest")

    def _need_examples(self) -> None:
        if not self.accepts:
            skip("set accepts = [(kind, source, answer), …], and rejects")
