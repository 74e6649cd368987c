import subprocess
import sys

import headrace_watermark
import pytest
import torch

from headrace.core.history import TokenHistory
from headrace.hooks.errors import ConfigError
from headrace.hooks.protocols import Context, Rows, SamplingContext
from headrace.testing import LogitsProcessorContract

KEY = "a secret"
SIZE = 400


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("WATERMARK_KEY", KEY)


class TestWatermark(LogitsProcessorContract):
    plugin = headrace_watermark
    params = ({"delta": 2.0}, {"delta": 20.0}, {})


def built(options=None):
    context = Context(sampling=SamplingContext(vocab_size=SIZE, num_slots=1))
    return headrace_watermark.Watermark(context, options or headrace_watermark.Options())


def answer(delta, num_tokens=200):
    """Tokens drawn from random logits, as the engine has them drawn."""
    processor, history = built(), TokenHistory(1)
    history.admit(0, [3], [])
    processor.admit(0, headrace_watermark.Params(delta=delta), None)
    generator = torch.Generator().manual_seed(1)
    for count in range(num_tokens):
        logits = processor.apply(torch.randn(1, SIZE, generator=generator), Rows([0], [count], history))
        history.append(0, int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return history.output(0).tolist()


def test_the_detector_finds_a_marked_answer_and_no_other():
    marked, plain = answer(delta=3.0), answer(delta=0.0)
    assert headrace_watermark.z_score(marked, KEY) > 8
    assert abs(headrace_watermark.z_score(plain, KEY)) < 3
    assert abs(headrace_watermark.z_score(marked, "another secret")) < 3


def test_a_sentence_said_over_and_over_counts_once():
    token_ids = answer(delta=3.0, num_tokens=12)
    once = headrace_watermark.z_score([*token_ids, token_ids[0]], KEY)
    assert headrace_watermark.z_score(token_ids * 50, KEY) == pytest.approx(once)


def test_the_green_share_is_gamma_and_another_half_after_each_token():
    lists = headrace_watermark.green(KEY, 0.25, torch.arange(50)[:, None].numpy(), torch.arange(SIZE).numpy())
    assert lists.mean() == pytest.approx(0.25, abs=0.01)
    assert (lists[0] & lists[1]).mean() == pytest.approx(0.25**2, abs=0.04)


def test_its_start_fails_without_a_secret(monkeypatch):
    monkeypatch.delenv("WATERMARK_KEY")
    with pytest.raises(ConfigError, match="WATERMARK_KEY"):
        built()


def test_the_detector_is_a_command():
    token_ids = answer(delta=3.0, num_tokens=40)
    said = subprocess.run(
        [sys.executable, "-m", "headrace_watermark", "--key", KEY],
        input=" ".join(map(str, token_ids)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(said.stdout) == pytest.approx(headrace_watermark.z_score(token_ids, KEY), abs=0.01)
