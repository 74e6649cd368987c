"""The contract of architectures: what it lets pass, and what it catches."""

from __future__ import annotations

import pytest

from headrace.core.model.config import Config
from headrace.hooks.program import Builder
from headrace.hooks.testing.contract import run
from headrace.plugins.llama import Llama
from headrace.testing import ArchitectureContract
from tests.kit.faults import contract_of, failures

CONFIG = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
LAYER = {
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}
SHAPES = {
    "model.embed_tokens.weight": (40, 16),
    "model.norm.weight": (16,),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()},
}
OPTIONAL = ("max_position_embeddings", "rms_norm_eps", "rope_theta", "num_key_value_heads")


class TestLlama(ArchitectureContract):
    plugin = "llama"
    name = "LlamaForCausalLM"
    config = CONFIG
    shapes = SHAPES
    optional = OPTIONAL


def tiny_model():
    """Of this family, for those who need something that runs."""
    return type("Tiny", (TestLlama,), {})().model()


class Good(Llama):
    names = ("it", "LlamaForCausalLM")


def writing(change):
    """Writes what another Builder would."""

    class Faulty(Good):
        def program(self, checkpoint):
            with pytest.MonkeyPatch.context() as patch:
                for name, function in change.items():
                    patch.setattr(Builder, name, function)
                return super().program(checkpoint)

    return Faulty


class Reads(Good):
    def program(self, checkpoint):
        checkpoint.tensor("model.norm.weight")
        return super().program(checkpoint)


class Trusts(Good):
    def program(self, checkpoint):
        checkpoint.metadata["intermediate_size"] + 1
        return super().program(checkpoint)


class Demands(Good):
    def program(self, checkpoint):
        Config(checkpoint).whole("max_position_embeddings")
        return super().program(checkpoint)


NORM, ATTEND, SCALE, ADD, LINEAR = Builder.norm, Builder.attend, Builder.scale, Builder.add, Builder.linear


def blind(self, query, key, value, **rest):
    ATTEND(self, query, key, value, **rest)
    return query


def other_name(self, x, name, **rest):
    return NORM(self, x, name.replace("ffn_norm", "attention_norm"), **rest)


def wide(self, x, name, width, **rest):
    return LINEAR(self, x, name, width + 16 if name.endswith("gate") or name.endswith("up") else width, **rest)


def huge(self, a, b):
    return ADD(self, SCALE(self, a, 1e38), SCALE(self, b, 1e38))


FAULTS = [
    ("test_it_has_the_name_it_is_registered_under", type("Faulty", (Good,), {"names": ("other",)})),
    ("test_its_program_fits_the_checkpoint", writing({"linear": wide})),
    ("test_all_of_the_checkpoint_is_used", writing({"norm": other_name})),
    ("test_writing_it_is_pure", Reads),
    ("test_sizes_that_are_missing_or_wrong_are_model_errors", Trusts),
    ("test_sizes_that_are_missing_or_wrong_are_model_errors", Demands),
    ("test_logits_are_finite_and_differ", writing({"add": huge})),
    ("test_the_order_of_tokens_counts", writing({"attend": blind})),
]


def made(component):
    return contract_of("architecture", component, config=CONFIG, shapes=SHAPES, optional=OPTIONAL)


def test_a_good_one_keeps_every_promise():
    assert set(run(made(Good)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component):
    assert test in failures(made(component), [test])


@pytest.mark.parametrize(
    "test", ["test_a_token_sees_those_before_it_and_no_other", "test_a_sequence_is_the_same_in_company_and_in_parts"]
)
def test_a_program_that_looks_at_other_tokens_is_caught(test, monkeypatch):
    """No family can write one, for operations see one token each; so the fault is planted under it."""
    from headrace.core.kernels import reference

    monkeypatch.setattr(reference, "_norm", lambda x, weight, eps: x - x.mean(0) + weight)
    assert test in failures(made(Good), [test])
