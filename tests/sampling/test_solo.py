"""A request draws the same tokens in any company as alone."""

import random

import pytest
import torch

from headrace.hooks.messages import Fork, Release
from tests.sampling.chains import Line

VOCAB_SIZE, NUM_SLOTS, NUM_STEPS = 300, 6, 40


def random_request(rng):
    """Parameters of one request; about half of the processors are in use."""
    chain = {
        "logit-bias": {"bias": {rng.randrange(VOCAB_SIZE): rng.uniform(-5, 5) for _ in range(3)}},
        "repetition": {"penalty": rng.uniform(0.7, 2)},
        "presence-frequency": {"presence": rng.uniform(-2, 2), "frequency": rng.uniform(-2, 2)},
        "min-tokens": {"count": rng.randrange(6)},
        "top-k": {"k": rng.choice([1, 5, 40, 290])},
        "top-p": {"p": rng.choice([0.3, 0.9, 0.99])},
        "min-p": {"p": rng.choice([0.001, 0.1])},
    }
    return {
        "chain": {name: values for name, values in chain.items() if rng.random() < 0.5},
        "temperature": rng.choice([0, 0, 0.5, 1.0, 1.7]),
        "seed": rng.randrange(-(2**63), 2**64),
        "end_ids": frozenset({1, 2}),
        "prompt": [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))],
        "logprobs": rng.choice([None, 2]),
    }


class Sequence:
    """A request in the batch: its logits by position, which stand for a model, and what it drew."""

    def __init__(self, request, choice, seed, position=0, tokens=()):
        self.request = request
        self.choice = choice
        self.logits = torch.randn(NUM_STEPS * 2, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2
        # Whole numbers are often equal, which is where company could make a difference.
        self.logits[::2] = self.logits[::2].round()
        self.first = position
        self.tokens = list(tokens)
        self.rows = []

    @property
    def position(self):
        return len(self.tokens)


def alone(sequence):
    """The tokens of the same request in a state of its own, with the same numbers of rows a step."""
    line = Line(VOCAB_SIZE, num_slots=1)
    tokens = sequence.tokens[: sequence.first]
    line.admit(0, **sequence.request, choice=sequence.choice, output=tokens)
    for num_rows in sequence.rows:
        positions = list(range(len(tokens), len(tokens) + num_rows))
        tokens = tokens + line.draw(sequence.logits[positions], [0] * num_rows, positions).token_ids
    return tokens


@pytest.mark.parametrize("seed", range(12))
def test_a_request_draws_in_any_company_what_it_draws_alone(seed):
    rng = random.Random(seed)
    line, running, ended = Line(VOCAB_SIZE, num_slots=NUM_SLOTS), {}, []
    for step in range(NUM_STEPS):
        ops = []
        for slot in [slot for slot in running if rng.random() < 0.1]:
            ended.append(running.pop(slot))
            ops += [Release(slot=slot)] if rng.random() < 0.5 else []
        for slot in [slot for slot in range(NUM_SLOTS) if slot not in running and rng.random() < 0.4]:
            source = rng.choice([None, *running])
            new_seed = seed * 1000 + step * NUM_SLOTS + slot
            if source is None or rng.random() < 0.5:
                running[slot] = Sequence(random_request(rng), 0, new_seed)
                ops.append(line.op(slot, **running[slot].request))
            else:
                parent = running[source]
                running[slot] = Sequence(parent.request, 3, new_seed, parent.position, parent.tokens)
                ops.append(Fork(source=source, slot=slot, choice=3))
        line.state.apply_ops(tuple(ops))
        chosen = rng.sample(sorted(running), rng.randrange(len(running) + 1))
        rows = []
        for slot in chosen:
            num_rows = rng.choice([1, 1, 1, 2])
            running[slot].rows.append(num_rows)
            rows += [(slot, running[slot].position + i) for i in range(num_rows)]
        if not rows:
            continue
        logits = torch.stack([running[slot].logits[position] for slot, position in rows])
        draws = line.draw(logits, [slot for slot, _ in rows], [position for _, position in rows])
        assert draws.errors == {}
        for (slot, _), token_id in zip(rows, draws.token_ids, strict=True):
            running[slot].tokens.append(token_id)
    ended += running.values()
    assert len(ended) > NUM_SLOTS
    for sequence in ended:
        assert alone(sequence) == sequence.tokens
