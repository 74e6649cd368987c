"""Logits processor `watermark`: makes a secret half of the vocabulary, another one after each token, a little likelier.

`python -m headrace_watermark --key KEY < TOKEN_IDS` is its detector: it needs the key and the ids, and no model.

Source: Kirchenbauer et al. 2023, A Watermark for Large Language Models, arXiv:2301.10226, algorithm 2 and equation 3;
bigrams count once, as in section 4. One thing is other than there: whether a token is green is a number of its own made
from key, token before and token, and not its place in a permutation. So the detector knows no vocabulary, and needs
the same time for a token of a large one.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta, Struct

import headrace
from headrace.hooks.errors import ConfigError

headrace_api = 1


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key_env: Annotated[str, Meta(min_length=1)] = "WATERMARK_KEY"
    """The environment variable with the secret. Without it, the start fails."""
    gamma: Annotated[float, Meta(gt=0, lt=1)] = 0.25
    """Share of the vocabulary that is green."""


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    delta: Annotated[float, Meta(ge=0, le=20)] = 0.0
    """Added to the logits of green tokens. 0: off."""


def mixed(numbers):
    """Each of *numbers*, uint64, as one that looks random: the finalizer of splitmix64, by Sebastiano Vigna."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def green(key, gamma, before, tokens):
    """Whether each of *tokens* is green after the token of *before*; both of integers, broadcast together."""
    secret = np.uint64(int.from_bytes(blake2b(key.encode(), digest_size=8).digest()))
    context = mixed(np.asarray(before, dtype=np.uint64) + secret)
    return mixed(context ^ mixed(np.asarray(tokens, dtype=np.uint64))) < np.uint64(gamma * 2.0**64)


class Watermark:
    phase = "bias"

    def __init__(self, context, options):
        self.key = os.environ.get(options.key_env, "")
        if not self.key:
            raise ConfigError(f"watermark: the secret must stand in the variable {options.key_env}, which is empty")
        self.gamma = options.gamma
        self.tokens = np.arange(context.sampling.vocab_size)
        self.delta = torch.zeros(context.sampling.num_slots)

    def admit(self, slot, params, admitted):
        self.delta[slot] = params.delta
        return params.delta > 0

    def apply(self, logits, rows):
        before = []
        for slot in rows.slots:
            output = rows.history.output(slot)
            before.append(int(output[-1] if len(output) else rows.history.prompt(slot)[-1]))
        greens = green(self.key, self.gamma, np.array(before)[:, None], self.tokens)
        return logits.add_(torch.from_numpy(greens) * self.delta[rows.slots, None])


def z_score(token_ids, key, gamma=0.25):
    """How many standard deviations more tokens are green than chance has it. Above 4, one text in 30,000 is by chance.

    Args:
        token_ids: of the answer alone. A pair of tokens counts once, however often it comes.
    """
    pairs = np.array(sorted(set(pairwise(token_ids))))
    if not len(pairs):
        return 0.0
    num_green = int(green(key, gamma, pairs[:, 0], pairs[:, 1]).sum())
    return (num_green - gamma * len(pairs)) / math.sqrt(len(pairs) * gamma * (1 - gamma))


def main():
    parser = argparse.ArgumentParser(prog="python -m headrace_watermark", description="Token ids in, z-score out.")
    parser.add_argument("--key", required=True)
    parser.add_argument("--gamma", type=float, default=0.25)
    asked = parser.parse_args()
    print(f"{z_score([int(word) for word in sys.stdin.read().split()], asked.key, asked.gamma):.2f}")


@headrace.plugin
def register_logits_processor(register):
    register("watermark", Watermark, config=Options, params=Params, doc="A watermark that statistics can find.")


if __name__ == "__main__":
    main()
