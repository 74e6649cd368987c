"""The contract of attention: what it lets pass, and what it catches."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest
import torch

from headrace.hooks.protocols import Context
from headrace.hooks.testing.contract import run
from headrace.plugins.sdpa import Plan, Sdpa
from headrace.testing import AttentionContract
from tests.kit.faults import contract_of, failures


class TestSdpa(AttentionContract):
    plugin = "sdpa"


class TestNative(AttentionContract):
    """In torch: what the layout of the compiled kernels' cache means. Nothing compiled runs."""

    kernels = "portable"

    plugin = "headrace.plugins.native_attention"
    name = "native"
    head_dims = (16, 64)
    tolerance = 4e-3  # Keys are off by half of 1/32767 of their norm, and scores here go to 20.

    def context(self):
        return Context(kernels=self.kernels)


class TestNativeBytes(TestNative):
    """Keys and values are off by half of 1/127 of their largest feature."""

    kernels = "portable"
    options: ClassVar = {"bits": 8}
    tolerance = 0.2


class Good(Sdpa):
    pass


def attending(change):
    """Attends with other settings."""

    def attend(self, query, kv, plan, **how):
        return Sdpa.attend(self, query, kv, plan, **{**how, **change(how)})

    return type("Faulty", (Good,), {"attend": attend})


class First(Good):
    """Plans once."""

    kept = None

    def plan(self, batch):
        self.kept = self.kept or Plan(batch)
        return self.kept


class Whole(Good):
    """Reads whole blocks."""

    def plan(self, batch):
        size = batch.block_size
        lens = [-(-length // size) * size for length in batch.seq_lens]
        plan = Plan(batch)
        for span, length in zip(plan.spans, lens, strict=True):
            span.seq_len = length
        return plan


def write_all(self, kv, key, value, plan):
    kv[plan.blocks] = torch.nan_to_num(kv[plan.blocks])
    Sdpa.write(self, kv, key, value, plan)


def swapped(self, kv, key, value, plan):
    Sdpa.write(self, kv, value, key, plan)


def sees_next(self, query, kv, plan, **how):
    for span in plan.spans:
        span._masks = {how["window"]: None}
    return Sdpa.attend(self, query, kv, plan, **how)


def in_place(self, query, kv, plan, **how):
    return Sdpa.attend(self, query.mul_(1.5), kv, plan, **{**how, "scale": how["scale"] / 1.5})


def mixed(self, query, kv, plan, **how):
    return Sdpa.attend(self, query, kv, plan, **how) + 0.01 * query.mean()


def from_zero(self, batch):
    positions = torch.cat([torch.arange(b - a) for a, b in zip(batch.cu_tokens, batch.cu_tokens[1:], strict=False)])
    return Plan(msgspec.structs.replace(batch, positions=positions))


FAULTS = [
    ("test_supports_says_why_not", type("Faulty", (Good,), {"supports": lambda self, **shape: None})),
    ("test_it_attends_as_the_definition_says", attending(lambda how: {"window": None})),
    ("test_it_attends_as_the_definition_says", attending(lambda how: {"softcap": None})),
    ("test_it_attends_as_the_definition_says", attending(lambda how: {"scale": 1.0})),
    ("test_it_attends_as_the_definition_says", First),
    ("test_it_attends_as_the_definition_says", Whole),
    ("test_it_attends_as_the_definition_says", type("Faulty", (Good,), {"attend": sees_next})),
    ("test_it_attends_as_the_definition_says", type("Faulty", (Good,), {"write": swapped})),
    ("test_a_sequence_is_the_same_alone_and_in_company", type("Faulty", (Good,), {"attend": mixed})),
    ("test_a_chunk_is_the_same_as_the_whole", type("Faulty", (Good,), {"plan": from_zero})),
    ("test_write_touches_the_places_of_its_tokens_alone", type("Faulty", (Good,), {"write": write_all})),
    ("test_it_leaves_what_it_is_given_as_it_is", type("Faulty", (Good,), {"attend": in_place})),
]


def test_a_good_one_keeps_every_promise():
    assert set(run(contract_of("attention", Good)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(contract_of("attention", component), [test])
