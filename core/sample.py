"""What was drawn, and whether it ends the answer. Receives `Logits`, sends `Sampled` to `stream` and `schedule`.

The draw itself happened on the compute thread, in the step's second half; this stage waits for it and applies the
finish rules that need no text. Knows neither blocks nor characters.
"""

from __future__ import annotations

from ..hooks.messages import FinishReason, Logits, Row, Sampled, SampledRow, Step, StepResult
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
    drawn = 0
    for row in step.rows:
        if not row.samples:
            rows.append(SampledRow(row=row))
            continue
        error = result.errors.get(drawn)
        token_id = -1 if error is not None else result.token_ids[drawn]
        rows.append(
            SampledRow(
                row=row,
                token_id=token_id,
                logprobs=result.logprobs.get(drawn),
                finish=FinishReason.ERROR if error is not None else finish_reason(row, token_id, end_ids),
                error=error,
            )
        )
        drawn += 1
    return Sampled(index=step.index, rows=tuple(rows), forward_s=result.forward_s, sample_s=result.sample_s)


def finish_reason(row: Row, token_id: int, end_ids: frozenset[int]) -> FinishReason | None:
    """Why the answer ends with this token, or None. An end token counts as a stop even where it is the last allowed."""
    params = row.sequence.request.params
    if token_id in params.stop_token_ids or (token_id in end_ids and not params.ignore_eos):
        return FinishReason.STOP
    if row.output_index + 1 >= row.max_tokens:
        return FinishReason.LENGTH
    return None
