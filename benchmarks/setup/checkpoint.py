"""A GGUF of the family llama, as a float32 checkpoint for transformers and vLLM.   checkpoint.py FILE.gguf FOLDER

transformers reads the GGUF but marks the model as quantized and will not save it, so its weights move into a new one.
"""

import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

NOT_KEPT = ("quantization_config", "_name_or_path", "dtype", "torch_dtype")


def main(gguf: Path, folder: Path) -> None:
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    values = {key: value for key, value in read.config.to_dict().items() if key not in NOT_KEPT}
    model = LlamaForCausalLM(LlamaConfig(**values)).to(torch.float32)
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        if not torch.equal(read(tokens).logits, model(tokens).logits):
            raise SystemExit("the copy must give the logits of the original, and does not")
    model.generation_config = GenerationConfig(
        **{name: values[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    # Its reader of GGUFs forgets that this family of tokenizers takes digits one by one.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = values["max_position_embeddings"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
