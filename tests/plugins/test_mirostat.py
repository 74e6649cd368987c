"""The sampler mirostat, against the algorithm as published, worked out one sequence at a time."""

import math

import torch

from headrace.core.history import TokenHistory
from headrace.core.uniform import uniform
from headrace.hooks.protocols import Rows
from tests.plugins.rig import admission, build, random_logits

STEPS = 40


def published(logits, seed, tau, eta):
    """Mirostat 2.0 for one sequence: the ids drawn, and mu at the end. *logits*: `[STEPS, vocab_size]`."""
    mu, ids = 2 * tau, []
    for step in range(STEPS):
        probabilities = logits[step].double().softmax(-1)
        kept = -probabilities.log2() <= mu
        kept[probabilities.argmax()] = True
        left = torch.where(kept, probabilities, 0)
        left /= left.sum()
        token_id = int((left.cumsum(0) > uniform(seed, 0, step)).nonzero()[0])
        ids.append(token_id)
        mu -= eta * (-math.log2(left[token_id]) - tau)
    return ids, mu


def test_mirostat_draws_as_published_for_each_slot_in_any_company():
    settings = {0: (1, 3.0, 0.1), 3: (2, 1.0, 0.5), 5: (3, 6.0, 0.05)}
    logits = {slot: random_logits(300, STEPS, seed=slot) for slot in settings}
    bound = build("sampler", "mirostat")
    drawn = {slot: [] for slot in settings}
    for slot, (_, tau, eta) in settings.items():
        bound.component.admit(slot, bound.params(tau=tau, eta=eta), admission(slot))
    places = dict.fromkeys(settings, 0)
    for turn in range(STEPS * 3):
        # Now these, now those, in ever other orders.
        slots = [slot for index, slot in enumerate(settings) if (turn + index) % 3 and places[slot] < STEPS]
        slots = slots[:: -1 if turn % 2 else 1]
        if not slots:
            continue
        numbers = [uniform(settings[slot][0], 0, places[slot]) for slot in slots]
        rows = Rows(slots, [places[slot] for slot in slots], TokenHistory(8))
        part = torch.stack([logits[slot][places[slot]] for slot in slots])
        for slot, token_id in zip(
            slots, bound.component.sample(part, torch.tensor(numbers).double(), rows).tolist(), strict=True
        ):
            drawn[slot].append(token_id)
            places[slot] += 1
    for slot, (seed, tau, eta) in settings.items():
        ids, mu = published(logits[slot], seed, tau, eta)
        assert drawn[slot] == ids
        assert abs(bound.component._mu[slot].item() - mu) < 1e-3


def test_mirostat_keeps_the_surprise_near_its_target():
    bound = build("sampler", "mirostat", vocab_size=1000)
    for tau in (2.0, 4.0):
        bound.component.admit(0, bound.params(tau=tau, eta=0.2), admission(0))
        observed = []
        for step in range(400):
            logits = random_logits(1000, 1, scale=2.0, seed=step)
            numbers = torch.tensor([uniform(9, 0, step)]).double()
            before = bound.component._mu[0].item()
            bound.component.sample(logits, numbers, Rows([0], [step], TokenHistory(1)))
            observed.append(tau - (bound.component._mu[0].item() - before) / 0.2)
        assert abs(sum(observed) / len(observed) - tau) < 0.2


def test_a_new_owner_of_a_slot_finds_nothing_of_the_last():
    bound = build("sampler", "mirostat")
    for _ in range(2):
        bound.component.admit(0, bound.params(tau=3.0), admission(0))
        assert bound.component._mu[0] == 6.0
        bound.component.sample(random_logits(100, 1), torch.tensor([0.99]).double(), Rows([0], [0], TokenHistory(1)))
        assert bound.component._mu[0] != 6.0


def test_the_likeliest_token_is_drawn_where_all_are_too_surprising():
    bound = build("sampler", "mirostat", vocab_size=64)
    bound.component.admit(0, bound.params(tau=0.1), admission(0))
    logits = torch.zeros(1, 64)
    logits[0, 17] = 0.001
    assert bound.component.sample(logits, torch.tensor([0.9]).double(), Rows([0], [0], TokenHistory(1))).tolist() == [
        17
    ]


def test_a_server_may_have_its_own_defaults():
    bound = build("sampler", "mirostat", tau=2.5)
    assert bound.options == bound.params(tau=2.5)
