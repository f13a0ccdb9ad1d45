"""Conversations as the template gets them: contents as text or parts, and variables that it reads or refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.tiny_models import make_tokenizer
from vattn.engine import InvalidRequest
from vattn.engine.requests.chat import render
from vattn.errors import ConfigError

TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}|{% endfor %}"
TOOLS = "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}{{ messages[0].content }}"
THINKING = "{% if enable_thinking %}THINK {% endif %}{{ messages[0].content }}"


def text_of(content: Any, template: str = TEXT, **options: Any) -> str:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return render(tokenizer, [{"role": "user", "content": content}], **options)


@pytest.mark.parametrize(
    ("content", "text", "parts"),
    [
        ("Hello", "Hello", "[Hello]"),
        ("", "", "[]"),
        (None, "", ""),
        ([], "", ""),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo", "[one][two]"),
        (({"type": "input_text", "text": "one"}, "two"), "one\ntwo", "[one][two]"),
        ([{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}], "no\nhm", "[no][hm]"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": ""}], "one", "[one][]"),
        ([{"type": "text", "text": None}, {"type": "output_text", "text": "two"}], "two", "[two]"),
    ],
)
def test_contents_are_text_or_parts_as_the_template_wants(content: Any, text: str, parts: str) -> None:
    assert text_of(content) == f"<user>{text}"
    assert text_of(content, PARTS) == f"{parts}|"
    assert text_of(content, PARTS, chat_template=TEXT) == f"<user>{text}"
    assert text_of(content, TEXT, chat_template=PARTS) == f"{parts}|"


def test_a_message_without_content() -> None:
    tokenizer = make_tokenizer()
    for template, want in ((TEXT, "<assistant>"), (PARTS, "|")):
        assert render(tokenizer, [{"role": "assistant"}], chat_template=template) == want


def test_what_a_tool_says_is_always_text() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = "{% for m in messages %}{% for p in m.content %}{{ p }},{% endfor %}{% endfor %}"
    assert render(make_tokenizer(), [{"role": "tool", "content": content}], chat_template=template) == (
        ",".join("one\ntwo") + ","
    )


def test_further_keys_of_parts_and_messages_reach_the_template() -> None:
    template = "{% for p in messages[0].content %}{{ p.cache }}{% endfor %}{{ messages[0].name }}"
    message = {"role": "user", "name": "me", "content": [{"type": "text", "text": "one", "cache": "kept"}]}
    assert render(make_tokenizer(), [message], chat_template=template) == "keptme"
    assert message["content"] == [{"type": "text", "text": "one", "cache": "kept"}], "the caller's own was changed"


def test_fields_that_are_null_count_as_absent() -> None:
    template = "{{ messages[0].name is defined }}{{ 'refusal' in messages[0] }}"
    message = {"role": "user", "name": None, "content": "one", "refusal": None}
    assert render(make_tokenizer(), [message], chat_template=template) == "FalseFalse"


def calling(*arguments: object, **fields: Any) -> list[dict[str, Any]]:
    """A conversation with a call for each of the arguments."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
    return [{"role": "assistant", "content": None, "tool_calls": calls, **fields}]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Zürich"}', '{"city": "Zürich"}'),
        ({"city": "Bern"}, '{"city": "Bern"}'),
        ("", "{}"),
        (None, "{}"),
    ],
)
def test_arguments_of_tool_calls_are_mappings(arguments: object, shown: str) -> None:
    """In OpenAI's shape they are JSON, which a template that writes JSON would write as text."""
    template = "{% for c in messages[0].tool_calls %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    conversation = calling(arguments, '{"n": 1}')
    before = copy.deepcopy(conversation)
    text = render(make_tokenizer(), conversation, chat_template=template + "{% endfor %}")
    assert text == f'1f{shown}1f{{"n": 1}}'
    assert conversation == before, "the caller's own was changed"


@pytest.mark.parametrize("arguments", ['{"city": ', "[" * 100_000, "[1]", "null", "5", '"Bern"', ["Bern"], 5])
def test_arguments_that_are_no_object_count_as_none(arguments: object, caplog: pytest.LogCaptureFixture) -> None:
    """As in vLLM: a conversation in which a model has written them goes on."""
    template = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    assert render(make_tokenizer(), calling(arguments, '{"n": 1}'), chat_template=template) == '{}{"n": 1}'
    assert caplog.messages == ["a tool call of 'f' has arguments that are no JSON object and count as none"]


@pytest.mark.parametrize("empty", [None, []])
def test_a_message_without_calls_has_no_field_for_them(empty: object) -> None:
    template = "{{ 'calls' if 'tool_calls' in messages[0] or 'function_call' in messages[0] else messages[0].content }}"
    conversation = [{"role": "assistant", "content": "w", "tool_calls": empty, "function_call": empty}]
    assert render(make_tokenizer(), conversation, chat_template=template) == "w"


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"reasoning": "hm"}, "hm|hm"),
        ({"reasoning_content": "hm"}, "hm|hm"),
        ({"reasoning": "hm", "reasoning_content": "ah"}, "hm|hm"),
        ({"reasoning": None, "reasoning_content": "ah"}, "ah|ah"),
        ({"reasoning": "", "reasoning_content": "ah"}, "|"),
        ({}, "-|-"),
    ],
)
def test_reasoning_reaches_the_template_under_both_names(fields: dict[str, Any], seen: str) -> None:
    template = "{{ messages[0].reasoning | default('-') }}|{{ messages[0].reasoning_content | default('-') }}"
    conversation = [{"role": "assistant", "content": "w", **fields}]
    assert render(make_tokenizer(), conversation, chat_template=template) == seen
    assert conversation == [{"role": "assistant", "content": "w", **fields}], "the caller's own was changed"


def test_calls_in_other_shapes_reach_the_template() -> None:
    template = "{% for c in messages[0].tool_calls %}{{ c.name or c }}{% endfor %}"
    conversation = calling(tool_calls=[{"name": "f", "arguments": "x"}, "g"])
    assert render(make_tokenizer(), conversation, chat_template=template) == "fg"


def test_calls_that_are_no_list_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="tool_calls of a message is a list of calls; this is 'f'") as caught:
        render(make_tokenizer(), calling(tool_calls="f"), chat_template=TEXT)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "loops"),
    [
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", True),
        (
            "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content | list %}x{% endfor %}{% endfor %}",
            True,
        ),
        (
            "{% set rest = messages[1:] if bos else messages %}{% for m in rest %}"
            "{% set content = m.get('content') or [] %}{% for p in content %}x{% endfor %}{% endfor %}",
            True,
        ),
        (
            "{% macro show(kind, body) %}{% for p in body %}x{% endfor %}{% endmacro %}"
            "{% macro both(body) %}{{ show('a', body=body) }}{% endmacro %}"
            "{% for m in messages %}{{ both(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(body) %}{{ body }}{% endmacro %}{% macro list(body) %}{% for p in body %}x{% endfor %}"
            "{% endmacro %}{% for m in messages %}{{ show(m.content) }}{{ list(m.tools) }}{% endfor %}",
            False,
        ),
        ("{% for m in messages %}{% for line in m.content.split('w') %}x{% endfor %}{% endfor %}", False),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", False),
    ],
)
def test_which_templates_take_parts(template: str, loops: bool) -> None:
    seen: list[Any] = []
    probe = make_tokenizer()

    def see(conversation: list[dict[str, Any]], **_: Any) -> str:
        seen.append(conversation[0]["content"])
        return ""

    probe.apply_chat_template = see
    render(probe, [{"role": "user", "content": "hello"}], chat_template=template)
    assert seen == [[{"type": "text", "text": "hello"}] if loops else "hello"]


def test_the_format_can_be_said() -> None:
    assert text_of("Hi", chat_template_content_format="openai") == "<user>[{'type': 'text', 'text': 'Hi'}]"
    assert text_of("Hi", PARTS, chat_template_content_format="string") == "[][]|"
    with pytest.raises(ConfigError, match="chat_template_content_format='list' is not one of auto, string, openai"):
        text_of("Hi", chat_template_content_format="list")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            "a part of type 'image_url', but the model reads text only",
        ),
        ([{"image_url": "x"}], "a part of type None"),
        ([{"type": ["text"]}], r"a part of type \['text'\]"),
        ([{"type": "text", "text": 5}], "a part whose text is 5; give text"),
        ([b"x"], "a part of type None"),
        (5, "a message's content is text, or a list of parts; this is 5"),
        ({"type": "text", "text": "x"}, "a message's content is text, or a list of parts; this is {'type'"),
    ],
)
def test_what_is_no_text_is_refused(content: Any, message: str) -> None:
    for template in (TEXT, PARTS):
        with pytest.raises(InvalidRequest, match=message):
            text_of(content, template)


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (["Hello"], "a message is a mapping, .*; this is 'Hello'"),
        ([{"content": "Hello"}], "a message has the role None"),
        ([{"role": 5, "content": "Hello"}], "a message has the role 5"),
        ("Hello", "a conversation is a list of messages"),
    ],
)
def test_what_is_no_message_is_refused(conversation: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        render(make_tokenizer(), conversation, chat_template=TEXT)


def test_variables_reach_the_template_either_way() -> None:
    assert text_of("Hi", THINKING) == "Hi"
    assert text_of("Hi", THINKING, enable_thinking=True) == "THINK Hi"
    assert text_of("Hi", THINKING, chat_template_kwargs={"enable_thinking": True}) == "THINK Hi"
    assert text_of("Hi", THINKING, chat_template_kwargs=None) == "Hi"
    assert text_of("Hi", TOOLS, tools=[{"name": "clock"}]) == "clock Hi"
    assert text_of("Hi", tools=[]) == "<user>Hi"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_thinkin": True}, "the chat has the option 'enable_thinkin', .* it has enable_thinking"),
        ({"return_dict": False}, "the chat has the option 'return_dict'"),
        ({"chat_template_kwargs": {"enable_thinkin": True}}, "^chat_template_kwargs has 'enable_thinkin', which is no"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs has 'add_generation_prompt'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has 'messages'"),
        ({"chat_template_kwargs": {5: True}}, "chat_template_kwargs has 5"),
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs is \[1\]; give a mapping"),
        ({"tools": [{"name": "clock"}]}, "tools: the chat template does not read them"),
        ({"chat_template": "{{ messages }}", "x": 1}, "'x', which is no variable of the chat template; it has none"),
    ],
)
def test_what_the_template_does_not_read_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        text_of("Hi", THINKING, **options)


def test_one_of_several_templates() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": TEXT, "tool_use": TOOLS, "parts": PARTS}
    conversation = [{"role": "user", "content": "Hi"}]
    assert render(tokenizer, conversation) == "<user>Hi"
    assert render(tokenizer, conversation, tools=[{"name": "clock"}]) == "clock Hi"
    assert render(tokenizer, conversation, chat_template="parts") == "[Hi]|"
