"""The `openai` package, as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.gateway.http_api.conftest import Http


@pytest.fixture
async def client(http: Http) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["fake"]


async def test_a_completion(client: openai.AsyncOpenAI) -> None:
    options = {"ignore_eos": True, "pdserve": {"breakdown": True}}
    answer = await client.completions.create(
        model="fake", prompt="the quick", max_tokens=5, seed=1, temperature=0, extra_body=options
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.model_extra is not None
    assert answer.model_extra["pdserve"]["transfer"]["kv_bytes"] > 0


async def test_a_chat_as_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "the quick"}],
        max_completion_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert len(chunks) == 6
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "length"


async def test_errors_are_of_the_packages_own_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p: ") as bad:
        await client.completions.create(model="fake", prompt="x", top_p=2)
    assert (bad.value.param, bad.value.code) == ("top_p", "InvalidRequest")
    with pytest.raises(openai.NotFoundError, match="model: 'other' is not served"):
        await client.completions.create(model="other", prompt="x")
