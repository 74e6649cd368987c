"""Scheduler policy `mlfq`: a skip-join multi-level feedback queue; short work first, and long work not for ever last.

Source: Wu et al. 2023, Fast Distributed Inference Serving for Large Language Models (FastServe), arXiv:2305.05920,
section 4.1. A request joins the level whose quantum covers its prompt, and after a preemption one that covers what it
has used by then; each level's quantum is twice that of the one above. What waits is promoted: `promote_s` makes up for
one level.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

import headrace

headrace_api = 1


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    quantum: Annotated[int, Meta(ge=1)] = 128
    """Tokens of prompt and answer that the first level covers."""
    levels: Annotated[int, Meta(ge=1, le=32)] = 8
    promote_s: Annotated[float, Meta(gt=0)] = 5.0
    """Seconds of waiting that make up for one level: long work waits at most (levels - 1) times as long on top."""


class MultiLevelFeedbackQueue:
    def __init__(self, context, options):
        self.options = options

    def level(self, num_tokens):
        """The first level whose quantum covers *num_tokens*; 0 is served first."""
        quanta = -(-num_tokens // self.options.quantum)
        return min(max(quanta - 1, 0).bit_length(), self.options.levels - 1)

    def order(self, waiting, now):
        # A request at level k that came at t is as good as one at level 0 that comes at t + k · promote_s.
        return (waiting.priority, waiting.arrival + self.level(waiting.num_tokens) * self.options.promote_s)

    def victim(self, running):
        return (running.priority, running.arrival + self.level(running.num_tokens) * self.options.promote_s)


@headrace.plugin
def register_scheduler_policy(register):
    register("mlfq", MultiLevelFeedbackQueue, config=Options, doc="A skip-join multi-level feedback queue.")
