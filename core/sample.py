"""What was drawn, and whether it ends the answer. Receives `Logits`, sends `Sampled` to `stream` and `schedule`.

The draw itself happened on the compute thread, in the step's second half; this stage waits for it and applies the
finish rules that need no text. Knows neither blocks nor characters.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..hooks.messages import FinishReason, Logits, Row, Sampled, SampledRow, Step, StepResult, TokenLogprobs
from .channel import Inbox, Outbox


async def sample(
    inbox: Inbox[Logits],
    stream: Outbox[Sampled],
    schedule: Outbox[Sampled],
    *,
    end_ids: frozenset[int],
) -> None:
    """Wait for each step's result and say what it came to.

    Args:
        end_ids: the model's own end tokens.
    """
    with inbox, stream, schedule:
        async for message in inbox:
            sampled = judge(message.step, await message.handle.result(), end_ids)
            # To `stream` first, and waiting: a slow `stream` slows the line instead of filling a channel.
            await stream.send(sampled)
            schedule.send_nowait(sampled)


def judge(step: Step, result: StepResult, end_ids: frozenset[int]) -> Sampled:
    """Put each drawn token beside its row, and say which end their answer."""
    rows: list[SampledRow] = []
    first = first_score = 0
    for row in step.rows:
        scores: tuple[TokenLogprobs, ...] = ()
        if row.num_scores:
            scores = tuple(result.scores[first_score : first_score + row.num_scores])
            first_score += row.num_scores
        if not row.samples:
            rows.append(SampledRow(row=row, scores=scores))
            continue
        token_id = result.token_ids[first]
        if row.num_drafts or token_id < 0 or first in result.errors:
            rows += _judge_row(row, first, result, end_ids, scores)
        else:  # As nearly always; the same in short.
            rows.append(
                SampledRow(
                    row=row,
                    token_id=token_id,
                    logprobs=result.logprobs.get(first),
                    finish=finish_reason(row, row.output_index, token_id, end_ids),
                    scores=scores,
                )
            )
        first += 1 + row.num_drafts
    return Sampled(
        index=step.index,
        rows=tuple(rows),
        forward_s=result.forward_s,
        sample_s=result.sample_s,
        plugins=result.plugins,
    )


def _judge_row(
    row: Row, first: int, result: StepResult, end_ids: frozenset[int], scores: tuple[TokenLogprobs, ...]
) -> Iterator[SampledRow]:
    """The token after the known ones, then those after guesses that were right, up to one that ends the answer."""
    for num_kept in range(1 + row.num_drafts):
        sample = first + num_kept
        error, token_id = result.errors.get(sample), result.token_ids[sample]
        if error is not None:
            yield SampledRow(row=row, num_kept=num_kept, finish=FinishReason.ERROR, error=error)
            return
        if token_id < 0:
            return
        finish = finish_reason(row, row.output_index + num_kept, token_id, end_ids)
        logprobs = result.logprobs.get(sample)
        yield SampledRow(row=row, token_id=token_id, num_kept=num_kept, logprobs=logprobs, finish=finish, scores=scores)
        if finish is not None:
            return


def finish_reason(row: Row, output_index: int, token_id: int, end_ids: frozenset[int]) -> FinishReason | None:
    """Why the answer ends with this token, or None. An end token counts as a stop even where it is the last allowed."""
    params = row.sequence.request.params
    if token_id in params.stop_token_ids or (token_id in end_ids and not params.ignore_eos):
        return FinishReason.STOP
    if output_index + 1 >= row.max_tokens:
        return FinishReason.LENGTH
    return None
