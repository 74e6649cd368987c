"""What a run of the load generator is asked to do. Holds values only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from .lengths import Fixed, Length

API = Literal["chat", "completions"]


class Targets(Struct, frozen=True, kw_only=True):
    """What a request must keep to count as good, each in milliseconds; None: anything will do.

    Attributes:
        ttft_ms: time to its first token.
        itl_ms: its mean time between tokens.
        e2e_ms: time to the end of its answer.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None


class Load(Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        url: of the server, with or without `/v1`.
        model: None: the first that the server lists.
        concurrency: closed loop: so many requests are always under way.
        rate: open loop: requests a second on average, at the times of a Poisson process. Just one of the two is set.
        max_in_flight: of an open loop; an arrival beyond it is not sent, and counts as an error.
        num_requests, duration_s: nothing is sent after so many requests, or seconds; what is under way is finished.
        output_tokens: None: 128, or with a data set what its answers have.
        shared_prefix_tokens: tokens in front of each prompt that it shares with others.
        num_prefixes: how many different ones take turns.
        warm_prefixes: ask for each prefix once before the clock runs.
        params: further fields of each request's body.
        seed: of lengths, arrivals and the order of a data set: two runs with the same are the same load.
        run_id: of the words: two runs with the same ask the same texts, others share none.
        num_warmups: requests before the clock runs, besides those that gauge the tokens of a word.
        timeout_s: of one request.
    """

    url: str
    run_id: str
    api: API = "chat"
    model: str | None = None
    concurrency: int | None = None
    rate: float | None = None
    max_in_flight: int = 1024
    num_requests: int | None = None
    duration_s: float | None = None
    prompt_tokens: Length = Fixed(tokens=128)
    output_tokens: Length | None = None
    shared_prefix_tokens: int = 0
    num_prefixes: int = 1
    warm_prefixes: bool = False
    dataset: Path | None = None
    ignore_eos: bool = False
    params: dict[str, msgspec.Raw] = {}
    seed: int = 0
    num_warmups: int = 0
    timeout_s: float = 600.0
    targets: Targets = Targets()
