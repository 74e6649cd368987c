"""What the operator has locked is refused at the door, whatever else the request says."""

import msgspec
import pytest

from headrace.core.engine import Engine
from headrace.hooks.errors import BadRequest
from headrace.hooks.messages import TokenPrompt
from headrace.hooks.settings import Sampling, Settings
from tests.fakes import make_parts
from tests.integration.lines import running

LOCKED = Settings(sampling=Sampling(locked=("temperature", "max_tokens", "logits.top-a.a", "sampler")))


@pytest.mark.parametrize(
    ("params", "rest", "param"),
    [
        ({"temperature": 0.5}, {}, "temperature"),
        ({}, {"extra": {"top-a": {"a": 0.5}}}, "headrace.logits.top-a.a"),
        ({}, {"sampler": {"tau": 5}}, "headrace.sampler.tau"),
    ],
)
async def test_a_locked_field_is_refused_with_400(params, rest, param, autojump_clock):
    async with running(Engine(LOCKED, parts=make_parts())) as engine:
        with pytest.raises(BadRequest) as error:
            engine.request(TokenPrompt(token_ids=(1,)), params, **rest)
    assert (error.value.status, error.value.param, error.value.code) == (400, param, "locked")


async def test_other_fields_are_taken_and_defaults_are_not_the_requests(autojump_clock):
    parts = msgspec.structs.replace(make_parts(), defaults={"max_tokens": 5})
    async with running(Engine(LOCKED, parts=parts)) as engine:
        request = engine.request(TokenPrompt(token_ids=(1,)), {"seed": 1})
        engine.close(request)
    assert (request.params.seed, request.params.max_tokens) == (1, 5)
