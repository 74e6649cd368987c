"""Tiny random Llamas of transformers, written as safetensors or GGUF, and batches for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.core.kernels import Batch
from headrace.core.kernels.reference import ReferenceModel
from headrace.core.model.load import load
from headrace.hooks.program import Checkpoint
from headrace.plugins.gguf import GGUFLoader
from headrace.plugins.llama import Llama
from headrace.plugins.safetensors import SafetensorsLoader
from headrace.plugins.sdpa import Sdpa
from headrace.plugins.sources import FileSource
from headrace.plugins.unquantized import Unquantized

BLOCK_SIZE = 16
TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def quiet(what: str, done_bytes: int, total_bytes: int) -> None:
    """Progress nobody looks at."""


def transformers_model(**changes: Any) -> LlamaForCausalLM:
    """Two layers, 6 heads over 2 KV heads of 16, width 48: heads are wider than the model."""
    sizes: dict[str, Any] = {
        "vocab_size": 99,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_implementation": "eager",
    }
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # Norms and biases, which start as ones and zeros.
                weight.copy_(torch.randn_like(weight) * 0.3 + ("norm" in name))
    return model


def expected_logits(model: LlamaForCausalLM, token_ids: Sequence[int]) -> Tensor:
    """`[num_tokens, vocab_size]`, by transformers."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def write_gguf(model: LlamaForCausalLM, path: Path, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write *model* as converters do: rows of Q and K permuted, a tied head left out."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_array("tokenizer.ggml.tokens", ["<a>", "é", ""])
    for key, value in (metadata or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        for part, num_heads in heads.items():
            if part in name:
                array = permuted(array, num_heads)
        for word, short in TENSORS.items():
            name = name.replace(word, short)
        writer.add_tensor(name, array)
    finish(writer)
    return path


def permuted(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave the halves of each head's rows."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything out."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """As the engine does: by what lies at the path."""
    artifact = FileSource().resolve(str(path), quiet)
    loader = {"gguf": GGUFLoader, "safetensors": SafetensorsLoader}[artifact.kind]()
    return loader.open(artifact)


def open_model(path: Path, *, num_blocks: int = 100) -> ReferenceModel:
    """Load what lies at *path*; its KV cache is full of NaN but for the null block."""
    checkpoint = open_checkpoint(path)
    model = load(
        checkpoint.artifact,
        checkpoint,
        Llama(),
        Unquantized(),
        Sdpa(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
    checkpoint.close()
    model.store.pool[1:] = torch.nan
    return model


def batch(*sequences: tuple[Sequence[int], int, Sequence[int]]) -> Batch:
    """A batch of (token ids, position of the first, block table), every token sampled."""
    counts = [len(token_ids) for token_ids, _, _ in sequences]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return Batch(
        token_ids=torch.tensor([token_id for token_ids, _, _ in sequences for token_id in token_ids]),
        positions=torch.cat([torch.arange(start, start + len(ids)) for ids, start, _ in sequences]),
        cu_tokens=starts,
        seq_lens=[start + len(token_ids) for token_ids, start, _ in sequences],
        block_tables=[torch.tensor(table) for _, _, table in sequences],
        block_size=BLOCK_SIZE,
        sample_rows=torch.arange(starts[-1]),
        num_decodes=next((i for i, count in enumerate(counts) if count > 1), len(counts)),
    )
