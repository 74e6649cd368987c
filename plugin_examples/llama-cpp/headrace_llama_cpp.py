"""Executor `llama-cpp`: Headrace's line over llama.cpp's batches and KV cells, through llama-cpp-python.

A step becomes one or more `llama_decode`; what is drawn from its logits is Headrace's own sampling. llama.cpp knows no
block tables, so each slot has a llama sequence, and what a step takes for computed is looked up by its tokens: what
another sequence still holds is shared with it (`llama_memory_seq_cp`), and the rest is computed again. That serves
prefix sharing, further choices, guesses and preemption alike, and needs nothing of a step but tokens and positions.

Source: llama.cpp, include/llama.h (`llama_batch`, `llama_decode`, `llama_memory_seq_*`).
"""

from __future__ import annotations

import os
import weakref
from array import array
from time import perf_counter
from typing import Annotated, Literal

import llama_cpp
import numpy as np
import structlog
import torch
from msgspec import Meta, Struct

import headrace
from headrace.hooks.errors import ConfigError
from headrace.hooks.messages import Admit, Fork, Release

headrace_api = 1

NO_ROOM = 1
"""What `llama_decode` returns when it finds no cells for a batch."""
WARNING = 3

log = structlog.get_logger()


@llama_cpp.llama_log_callback
def tell(level, text, user_data):
    """llama.cpp's own log; it says much that nobody needs to know."""
    if level == WARNING or level == WARNING + 1:
        log.warning("llama.cpp", said=text.decode(errors="replace").strip())


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    n_ctx: Annotated[int, Meta(ge=16)] = 8192
    """KV cells: tokens of all sequences together. The line keeps within them."""
    sequences: Annotated[int, Meta(ge=1, le=256)] | None = None
    """Unset: `line.max_running`, which is also the least there must be."""
    n_batch: Annotated[int, Meta(ge=1)] = 512
    """Tokens of one `llama_decode`."""
    threads: Annotated[int, Meta(ge=1)] | None = None
    kv_type: Literal["f16", "f32"] = "f16"


class Llama:
    """The model and its cells. Sequences are numbers below *num_sequences*."""

    def __init__(self, path, options, num_sequences):
        llama_cpp.llama_log_set(tell, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
        if not self.model:
            raise ConfigError(f"llama-cpp: {path} must be a GGUF file that llama.cpp can load; see its messages")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = options.n_ctx, num_sequences, True
        params.n_batch = params.n_ubatch = self.n_batch = options.n_batch
        params.n_threads = params.n_threads_batch = options.threads or len(os.sched_getaffinity(0))
        params.type_k = params.type_v = {"f32": 0, "f16": 1}[options.kv_type]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise ConfigError("llama-cpp: llama.cpp must be able to make a context of these options; see its messages")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        weakref.finalize(self, _free, self.batch, self.context, self.model)

    def decode(self, tokens, evict):
        """Compute *tokens*, each (id, position, sequence, whether its logits are wanted).

        Args:
            evict: makes room, or returns False.

        Returns:
            The logits that are wanted, `[num_wanted, vocab_size]` float32.
        """
        found = []
        for start in range(0, len(tokens), self.n_batch):
            part = tokens[start : start + self.n_batch]
            self.batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, wanted
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            while (status := llama_cpp.llama_decode(self.context, self.batch)) == NO_ROOM and evict():
                pass
            if status:
                raise RuntimeError(f"llama_decode of {len(part)} tokens returned {status}; is n_ctx large enough?")
            found += [self._logits(i) for i, (*_, wanted) in enumerate(part) if wanted]
        return torch.from_numpy(np.stack(found)) if found else torch.empty(0, self.vocab_size)

    def keep(self, sequence, count):
        """Forget all but the first *count* tokens of *sequence*; False: this model can only forget it whole."""
        return llama_cpp.llama_memory_seq_rm(self.memory, sequence, count, -1)

    def share(self, source, sequence, start, stop):
        """Let *sequence* have what *source* has at these positions."""
        llama_cpp.llama_memory_seq_cp(self.memory, source, sequence, start, stop)

    def _logits(self, i):
        pointer = llama_cpp.llama_get_logits_ith(self.context, i)
        return np.ctypeslib.as_array(pointer, (self.vocab_size,)).copy()


class Cells:
    """Which llama sequence holds which tokens, and whose slot it is."""

    def __init__(self, llama, num_sequences):
        self.llama = llama
        self.held = {sequence: array("i") for sequence in range(num_sequences)}  # Those used last come last.
        self.of_slot = {}
        self.in_use = set()  # By the step that is being made.

    def prepare(self, slot, known):
        """Have *slot*'s sequence hold a beginning of *known*, and no more. Returns it and how many tokens it holds."""
        sequence = self.of_slot.get(slot)
        if sequence is None:
            sequence = self._oldest()
            self._forget(sequence)
            self.of_slot[slot] = sequence
        self.held[sequence] = held = self.held.pop(sequence)
        self.in_use.add(sequence)
        count = common(held, known)
        if count < len(held):
            count = count if self.llama.keep(sequence, count) else self._forget(sequence)
            held = self.held[sequence] = held[:count]
        if count < len(known):
            # Those that another owner has left count too, until they are needed.
            source = max(self.held, key=lambda each: common(self.held[each], known))
            stop = common(self.held[source], known)
            if stop > count:
                self.llama.share(source, sequence, count, stop)
                held += known[count:stop]
        return sequence, len(held)

    def release(self, slot):
        """Its tokens stay until the sequence is needed: someone may go on from them."""
        self.of_slot.pop(slot, None)

    def evict(self):
        """Forget what was used longest ago and not in this step."""
        found = next((each for each, held in self.held.items() if held and each not in self.in_use), None)
        return found is not None and self._forget(found) == 0

    def _oldest(self):
        found = next((each for each in self.held if each not in self.in_use), None)
        if found is None:
            raise RuntimeError("sequences must be at least max_running, and all are in use")
        return found

    def _forget(self, sequence):
        self.llama.keep(sequence, 0)
        self.held[sequence] = array("i")
        self.of_slot = {slot: each for slot, each in self.of_slot.items() if each != sequence}
        return 0


class Runner:
    """What a step means. *sampling*: the line's own, see `headrace.hooks.protocols.StepSampling`."""

    def __init__(self, llama, num_sequences, sampling):
        self.llama = llama
        self.cells = Cells(llama, num_sequences)
        self.sampling = sampling
        self.known = {}  # Slot → its tokens, prompt and answer.

    def __call__(self, step):
        started = perf_counter()
        logits = self.forward(step)
        result = self.sampling.draw(step, logits, forward_s=perf_counter() - started)
        for slot, token in zip(step.sample_slots, result.token_ids, strict=True):
            if token >= 0:
                self.known[slot].append(token)
        return result

    def _apply(self, op):
        match op:
            case Admit():
                self.known[op.slot] = op.prompt_ids + op.output_ids
            case Fork():
                self.known[op.slot] = self.known[op.source][:]
            case Release():
                self.known.pop(op.slot, None)
                self.cells.release(op.slot)

    def forward(self, step):
        """Logits of the step's sample rows, and of its score rows after them."""
        ids = self.sampling.begin(step)
        for op in step.slot_ops:
            self._apply(op)
        rows = (step.sample_rows + step.score_rows).tolist()
        wanted, tokens, place, grown = set(rows), [], {}, {}
        self.cells.in_use.clear()
        for i, slot in enumerate(step.slots):
            first, last = step.cu_tokens[i : i + 2]
            if first == last:
                continue
            start, new = step.positions[first], ids[first:last]
            sequence, count = self.cells.prepare(slot, self.known[slot][:start])
            missing = self.known[slot][count:start]
            tokens += [(token, count + j, sequence, False) for j, token in enumerate(missing)]
            for row, token in enumerate(new, first):
                if row in wanted:
                    place[row] = len(place)
                tokens.append((token, start + row - first, sequence, row in wanted))
            grown[sequence] = missing + new
        logits = self.llama.decode(tokens, self.cells.evict)
        for sequence, new in grown.items():
            self.cells.held[sequence] += new
        return logits[[place[row] for row in rows]]


def common(a, b):
    """How many tokens *a* and *b* begin with alike."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])


def executor(context, options):
    """The executor: llama.cpp on the line's own thread."""
    artifact, line = context.checkpoint.artifact, context.executor
    if artifact.kind != "gguf":
        raise ConfigError(f"llama-cpp reads GGUF files alone, and {artifact.path} is {artifact.kind}")
    num_sequences = options.sequences or line.max_running
    if num_sequences < line.max_running:
        raise ConfigError(f"llama-cpp: sequences must be >= line.max_running ({line.max_running}), got {num_sequences}")
    llama = Llama(artifact.path, options, num_sequences)
    if llama.vocab_size != line.vocab_size:
        raise ConfigError(f"llama-cpp: logits must be {line.vocab_size} wide, and llama.cpp's are {llama.vocab_size}")
    built = line.on_thread(Runner(llama, num_sequences, line.sampling))
    built.num_blocks = options.n_ctx // line.block_size
    return built


def _free(batch, context, model):
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


@headrace.plugin
def register_executor(register):
    register("llama-cpp", executor, config=Options, doc="Steps run by llama.cpp, from a GGUF file.")
