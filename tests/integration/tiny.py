"""A tiny random Llama that can be talked to: a Hugging Face folder with weights, byte-level tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.model.tiny import transformers_model

SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_MODEL_LEN = 512


def write_tiny(folder: Path) -> Path:
    """Write it to *folder*: tokens 0 … 255 are bytes, and each of `SPECIALS` follows them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    model = transformers_model(vocab_size=engine.get_vocab_size(), max_position_embeddings=MAX_MODEL_LEN)
    model.save_pretrained(folder)
    engine.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "generation_config.json").unlink()  # It names the end tokens of another vocabulary.
    return folder
