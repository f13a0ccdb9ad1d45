"""langchain-openai's models, pointed at the server by `base_url`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from tests.support.servers import Server

ANSWER = "7 + 5 = 12, so 17 + 25 = 42."
QUESTION = "What is 17 + 25?"


class Verdict(BaseModel):
    """What the model thinks of it."""

    right: bool
    word: Literal["one", "two"]


@pytest.fixture
def chat(server: Server) -> ChatOpenAI:
    return make(server)


def make(server: Server, **options: Any) -> ChatOpenAI:
    defaults: dict[str, Any] = {"model": "tiny", "api_key": "none", "temperature": 0, "max_retries": 0, "timeout": 60}
    return ChatOpenAI(base_url=f"{server.url}/v1", **{**defaults, "max_tokens": 64, **options})


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke(QUESTION)
    assert str(answer.content).strip() == ANSWER
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "tiny"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 5


def test_stream(chat: ChatOpenAI) -> None:
    chunks = list(chat.stream([HumanMessage(QUESTION)], stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks).strip() == ANSWER
    assert len(chunks) > 5
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.usage_metadata == chat.invoke(QUESTION).usage_metadata


def test_batch(chat: ChatOpenAI) -> None:
    answers = chat.batch([f"What is {number} + 7?" for number in range(10)], config={"max_concurrency": 5})
    assert [str(number + 7) in str(answer.content) for number, answer in enumerate(answers)].count(True) >= 8


def test_async(chat: ChatOpenAI) -> None:
    async def test() -> list[str]:
        invoked = await chat.ainvoke(QUESTION)
        streamed = [str(chunk.content) async for chunk in chat.astream(QUESTION)]
        (batched,) = await chat.abatch([QUESTION])
        return [str(invoked.content), "".join(streamed), str(batched.content)]

    assert {text.strip() for text in asyncio.run(test())} == {ANSWER}


@pytest.mark.parametrize("include_raw", [False, True])
def test_structured_output(chat: ChatOpenAI, include_raw: bool) -> None:
    structured = chat.with_structured_output(Verdict, method="json_schema", include_raw=include_raw)
    answer = structured.invoke(QUESTION)
    assert isinstance(answer["parsed"] if include_raw else answer, Verdict)


def test_a_stream_of_structured_output(chat: ChatOpenAI) -> None:
    *_, last = chat.with_structured_output(Verdict, method="json_schema").stream(QUESTION)
    assert isinstance(last, Verdict)


def test_json_mode(server: Server) -> None:
    chat = make(server, max_tokens=1000).bind(response_format={"type": "json_object"}, stop=["}"])
    assert str(chat.invoke(QUESTION).content).lstrip().startswith("{")


def test_tools_are_refused_by_name(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat.bind_tools([Verdict]).invoke(QUESTION)


def test_logprobs(server: Server) -> None:
    answer = make(server, logprobs=True, top_logprobs=3).invoke(QUESTION)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens).strip().startswith(ANSWER)
    assert all(len(token["top_logprobs"]) == 3 for token in tokens)


def test_a_chain_with_a_conversation(chat: ChatOpenAI) -> None:
    history = [SystemMessage("w"), HumanMessage("What is 3 + 4?"), AIMessage("3 + 4 = 7.")]
    chain = ChatPromptTemplate.from_messages([*history, ("human", "{question}")]) | chat
    assert chain.invoke({"question": QUESTION}).content


def test_stop_n_and_extra_fields(server: Server) -> None:
    chat = make(server, extra_body={"top_k": 1, "min_tokens": 2}, temperature=1)
    (many,) = make(server, n=2, temperature=1).generate([[HumanMessage(QUESTION)]]).generations
    assert len(many) == 2
    assert str(chat.invoke(QUESTION, stop=["12"]).content).strip() == "7 + 5 ="


def test_completions(server: Server) -> None:
    model = OpenAI(base_url=f"{server.url}/v1", model="tiny", api_key="none", temperature=0, max_tokens=64)
    prompt = f"Question: {QUESTION}\nAnswer:"
    assert model.invoke(prompt).strip() == ANSWER
    assert "".join(model.stream(prompt)).strip() == ANSWER
    assert [text.strip() for text in model.batch([prompt, prompt])] == [ANSWER, ANSWER]
