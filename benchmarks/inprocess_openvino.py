"""OpenVINO GenAI in its own process: its pipeline with continuous batching, straight from the GGUF.

Runs with the interpreter of the peer's own environment, so it imports nothing of ours. The last line is JSON. Decode is
the difference of two runs on equally long prompts, one of them of a single token; OpenVINO draws (greedily) in both.
"""

import argparse
import json
import random
import statistics
import time

import openvino_genai

PROMPT = OUTPUT = 128
LONG = 512
WORDS = ["time", "year", "people", "way", "day", "life", "child", "world", "school", "state", "family", "group"]


class Bench:
    """A pipeline and prompts of a wanted length, each different from its first word on."""

    def __init__(self, model: str, threads: int, step_tokens: int, options: dict[str, str]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1  # GiB
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = step_tokens
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.LLMPipeline(
            model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, **options
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._random = random.Random(0)

    def prompt(self, num_tokens: int) -> str:
        """Exactly so many tokens: words are taken away from a text that is long enough."""
        words = self._random.choices(WORDS, k=num_tokens)
        while len(words) > 1 and self._length(words) > num_tokens:
            words.pop()
        return " ".join(words)

    def seconds(self, num_seqs: int, prompt_tokens: int, max_tokens: int) -> float:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        prompts = [self.prompt(prompt_tokens) for _ in range(num_seqs)]
        started = time.perf_counter()
        self._pipeline.generate(prompts, config)
        return time.perf_counter() - started

    def _length(self, words: list[str]) -> int:
        return int(self._tokenizer.encode(" ".join(words)).input_ids.shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--option", dest="options", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    started = time.perf_counter()
    bench = Bench(args.model, args.threads, args.step_tokens, dict(option.split("=", 1) for option in args.options))
    figures = {"load_s": time.perf_counter() - started}
    bench.seconds(1, PROMPT, 8)
    figures["prefill_512"] = LONG / statistics.median(bench.seconds(1, LONG, 1) for _ in range(args.repeats))
    for num_seqs in args.batches:
        first = bench.seconds(num_seqs, PROMPT, 1)
        figures[f"decode_{num_seqs}"] = num_seqs * (OUTPUT - 1) / (bench.seconds(num_seqs, PROMPT, OUTPUT) - first)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
