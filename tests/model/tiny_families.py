"""Tiny random models of every family, by transformers, written as safetensors or as converters write GGUF.

The names of GGUF tensors come from the gguf package's own table, so that ours are compared with somebody else's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from msgspec import Struct
from torch import Tensor

from headrace.core.kernels.reference import ReferenceModel
from headrace.core.model.load import load
from headrace.hooks.program import Program
from headrace.hooks.protocols import Architecture, Attention
from headrace.plugins.sdpa import Sdpa
from headrace.plugins.unquantized import Unquantized
from tests.model.tiny import BLOCK_SIZE, finish, open_checkpoint, permuted

Model = Any
Changes = Mapping[str, Any]

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
WIDE = {"head_dim": 16}
"""Heads that are together wider than the model."""
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}


class Family(Struct, frozen=True, kw_only=True):
    """How to make and write a family's models.

    Attributes:
        module: below `headrace.plugins`.
        hf: what transformers calls it, without `Config` and the class's ending.
        gguf: the architecture of its GGUF files; "" where there is none.
        sizes: instead of SIZES.
        changes: to the sizes.
        norm_plus: what GGUF adds to the weights of norms.
        permuted: GGUF has rows of Q and K interleaved.
    """

    module: str
    cls: str
    hf: str
    gguf: str
    model: str = ""
    config: str = ""
    sizes: Changes = {}
    changes: Changes = {}
    permuted: bool = False
    norm_plus: float = 0.0


FAMILIES = {
    "llama": Family(module="llama", cls="Llama", hf="Llama", gguf="llama", changes=WIDE, permuted=True),
    "mistral": Family(
        module="mistral",
        cls="Mistral",
        hf="Mistral",
        gguf="llama",
        changes=WIDE | {"sliding_window": 20},
        permuted=True,
    ),
    "qwen2": Family(module="qwen2", cls="Qwen2", hf="Qwen2", gguf="qwen2"),
    "qwen3": Family(module="qwen3", cls="Qwen3", hf="Qwen3", gguf="qwen3", changes=WIDE),
    "gemma2": Family(
        module="gemma2",
        cls="Gemma2",
        hf="Gemma2",
        gguf="gemma2",
        # Caps as low as this show in scores and logits of random weights.
        changes=WIDE
        | {
            "query_pre_attn_scalar": 16,
            "sliding_window": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        norm_plus=1.0,
    ),
    "gemma3": Family(
        module="gemma3",
        cls="Gemma3",
        hf="Gemma3",
        gguf="gemma3",
        config="Gemma3TextConfig",
        changes=WIDE | {"query_pre_attn_scalar": 16, "sliding_window": 20, "num_hidden_layers": 7},
        norm_plus=1.0,
    ),
    "phi3": Family(module="phi3", cls="Phi3", hf="Phi3", gguf="phi3"),
    "olmo2": Family(module="olmo2", cls="Olmo2", hf="Olmo2", gguf="olmo2"),
    "smollm3": Family(
        module="smollm3", cls="SmolLM3", hf="SmolLM3", gguf="smollm3", changes={"num_hidden_layers": 5}, permuted=True
    ),
    "gpt2": Family(module="gpt2", cls="GPT2", hf="GPT2", gguf="gpt2", model="GPT2LMHeadModel", sizes=GPT2_SIZES),
    "mixtral": Family(
        module="mixtral",
        cls="Mixtral",
        hf="Mixtral",
        gguf="llama",
        changes={"num_local_experts": 5, "num_experts_per_tok": 2},
        permuted=True,
    ),
    "qwen3_moe": Family(
        module="qwen3_moe",
        cls="Qwen3Moe",
        hf="Qwen3Moe",
        gguf="qwen3moe",
        changes=WIDE
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}


def make(family: Family, **changes: Any) -> Model:
    """A seeded model whose norms and biases are random too."""
    config_class = getattr(transformers, family.config or f"{family.hf}Config")
    model_class = getattr(transformers, family.model or f"{family.hf}ForCausalLM")
    torch.manual_seed(11)
    model = model_class(config_class(**{**(family.sizes or SIZES), **family.changes, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # Norms and biases, which start as ones and zeros.
                centre = float("bias" not in name) - family.norm_plus
                weight.copy_(torch.randn_like(weight) * 0.3 + centre)
            elif "gate.weight" in name and weight.shape[0] == 5:  # The router of transformers starts as zeros.
                weight.copy_(torch.randn_like(weight) * 0.2)
    return model


def architecture(family: Family, kind: str = "safetensors") -> Architecture:
    """The plugin that reads the family's checkpoints of that kind."""
    name = "llama" if kind == "gguf" and family.gguf == "llama" else family.module
    module = importlib.import_module(f"headrace.plugins.{name}")
    found: Architecture = getattr(module, "Llama" if name == "llama" else family.cls)()
    return found


def write(family: Family, model: Model, kind: str, folder: Path, metadata: Changes | None = None) -> Path:
    """Write *model* in *folder*; returns what a user would name."""
    if kind == "gguf":
        return write_gguf(family, model, folder / "tiny.gguf", metadata or {})
    model.save_pretrained(folder / "tiny")
    return folder / "tiny"


def open_model(
    path: Path, architecture: Architecture, *, num_blocks: int = 60, attention: Attention | None = None
) -> ReferenceModel:
    """Load what lies at *path*; its KV cache is full of NaN but for the null block."""
    checkpoint = open_checkpoint(path)
    model = load(
        checkpoint.artifact,
        checkpoint,
        architecture,
        Unquantized(),
        Sdpa(),
        num_blocks=60,
        block_size=BLOCK_SIZE,
    )
    checkpoint.close()
    model.store.pool[1:] = torch.nan
    return model


def program_of(path: Path, architecture: Architecture) -> Program:
    """The Program of what lies at *path*."""
    checkpoint = open_checkpoint(path)
    program = architecture.program(checkpoint)
    checkpoint.close()
    return program


def write_gguf(family: Family, model: Model, path: Path, metadata: Changes) -> Path:
    """As llama.cpp's converters do: experts stacked, fused matrices as they are, norms with their 1 added."""
    config, arch = model.config, family.gguf
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.value_length": getattr(config, "head_dim", None),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "expert_count": getattr(config, "num_local_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_epsilon", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }
    rope = getattr(config, "rope_parameters", None) or {}
    numbers["rope.freq_base"] = rope.get("full_attention", rope).get("rope_theta")
    for key, value in (numbers | dict(metadata)).items():
        add(writer, f"{arch}.{key}", value)
    for name, array in converted(family, model):
        writer.add_tensor(name, np.ascontiguousarray(array))
    finish(writer)
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One key of the metadata; None leaves it out. A name without the architecture is a tensor's."""
    if key.endswith(".weight"):
        writer.add_tensor(key.split(".", 1)[1], np.array(value, dtype=np.float32))
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_uint32(key, value)


def converted(family: Family, model: Model) -> list[tuple[str, np.ndarray]]:
    """The tensors of a GGUF file, by the table of the gguf package."""
    config = model.config
    table = gguf.get_tensor_name_map(
        {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[family.gguf], config.num_hidden_layers
    )
    found = []
    for name, tensor in unstacked(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if family.permuted and any(part in name for part in ("q_proj", "k_proj")):
            count = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = permuted(array, count)
        if family.hf == "GPT2" and array.ndim == 2 and ".h." in name:
            array = array.T
        if "norm" in name:
            array = array + np.float32(family.norm_plus)
        place = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        found.append((place, array))
    return found


def unstacked(model: Model) -> list[tuple[str, Tensor]]:
    """A model's tensors, with the fused experts of transformers split as files have them."""
    found = []
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            stem = name.removesuffix("gate_up_proj")
            found += [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
        else:
            found.append((name if name.endswith((".weight", ".bias")) else f"{name}.weight", tensor))
    return found


def reference_logits(model: Model, token_ids: Sequence[int]) -> Tensor:
    """`[num_tokens, vocab_size]`, by transformers."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
