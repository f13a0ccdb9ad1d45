"""Conversations: from messages to the text of a prompt, by the tokenizer's chat template."""

from __future__ import annotations

import functools
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from jinja2 import TemplateError, meta, nodes
from transformers import PreTrainedTokenizerBase

from vattn.integers import shown

from ..checks import check_encodable, checked_choice
from .request import InvalidRequest

logger = logging.getLogger(__name__)

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
ContentFormat = Literal["auto", "string", "openai"]

# Fields of messages; templates may ask whether one is there, however empty it is.
CALLS = ("tool_calls", "function_call")
# Variables of templates that `render` has parameters for.
_OWN = frozenset({"messages", "tools", "add_generation_prompt"})
_MESSAGES, _KWARGS = "messages", "chat_template_kwargs"
# The types of parts that are text, and the key under which each has it.
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation is a sequence of mappings.

    Raises:
        InvalidRequest: it is neither that nor a sequence of them.
    """
    _check_list("a conversation is a list of messages, such as {'role': 'user', 'content': ...}", messages)
    if len(messages) > 0 and isinstance(messages[0], Mapping):
        return [cast(Conversation, messages)]
    return list(cast(Sequence[Conversation], messages))


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    chat_template: str | None = None,
    chat_template_content_format: ContentFormat = "auto",
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **variables: Any,
) -> str:
    """The text that a chat template makes of a conversation; names and meanings as in vLLM.

    Args:
        conversation: messages with "role" and "content", and whatever else the template knows. A content is text, None
            for none, or a list of parts, such as `{"type": "text", "text": "Hello"}`. The arguments of `tool_calls` are
            mappings, or JSON of one; what is neither counts as none.
        chat_template: a template in place of the tokenizer's, or the name of one of several.
        chat_template_content_format: how the template gets contents: "openai", as lists of parts; "string", as text,
            parts joined by line breaks; "auto", as lists where the template loops over them, and else as text.
        add_generation_prompt: write the beginning of an answer after the messages; by default unless
            `continue_final_message`.
        continue_final_message: leave the last message open, to be continued.
        tools: descriptions of tools, for a template that reads them.
        chat_template_kwargs, variables: variables of the template, such as `enable_thinking`.

    Raises:
        InvalidRequest: there is no template, it does not read one of the variables, or it refuses the messages; or
            they are not text.
        ConfigError: an unknown format.
    """
    checked_choice("chat_template_content_format", chat_template_content_format, get_args(ContentFormat))
    if chat_template is None and not tokenizer.chat_template:
        raise InvalidRequest(
            "the model's tokenizer has no chat template, so it is not known how messages become a prompt; pass "
            "chat_template=..., or give a prompt as text",
            param=_MESSAGES,
        )
    if chat_template_kwargs is None:
        chat_template_kwargs = {}
    elif not isinstance(chat_template_kwargs, Mapping):
        raise InvalidRequest(f"chat_template_kwargs is {shown(chat_template_kwargs)}; give a mapping", param=_KWARGS)
    _check_list("a conversation is a list of messages, such as {'role': 'user', 'content': ...}", conversation)
    try:
        source = tokenizer.get_chat_template(chat_template, cast(Any, tools))
        template = _read(source)
        template.check("chat_template_kwargs has", chat_template_kwargs, _KWARGS)
        template.check("the chat has the option", variables, None)
        if tools and "tools" not in template.variables:
            raise InvalidRequest(
                "tools: the chat template does not read them; describe the tools in a message", param="tools"
            )
        as_parts = template.takes_parts
        if chat_template_content_format != "auto":
            as_parts = chat_template_content_format == "openai"
        text = tokenizer.apply_chat_template(
            cast(Any, [_message(message, as_parts) for message in conversation]),
            tools=cast(Any, tools),
            chat_template=source,
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **{**chat_template_kwargs, **variables},
        )
    except InvalidRequest:
        raise
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"the chat template refuses these messages: {error}", param=_MESSAGES) from error
    check_encodable("the conversation", cast(str, text), InvalidRequest, _MESSAGES)
    return cast(str, text)


@dataclass(frozen=True)
class _Template:
    """What a template says about what it takes.

    Attributes:
        variables: those that it reads.
        takes_parts: the content of a message is a list of parts, and not text.
    """

    variables: frozenset[str]
    takes_parts: bool

    def check(self, where: str, given: Mapping[str, Any], param: str | None) -> None:
        """Raise an InvalidRequest for a variable that the template does not read."""
        for name in given:
            if name in _OWN or name not in self.variables:
                names = ", ".join(sorted(self.variables - _OWN)) or "none"
                raise InvalidRequest(
                    f"{where} {shown(name)}, which is no variable of the chat template; it has {names}",
                    param=param,
                )


def check_template(source: str) -> None:
    """Raises jinja2's TemplateError for what is no template."""
    _read(source)


@functools.lru_cache(maxsize=32)
def _read(source: str) -> _Template:
    # Only this environment knows all tags of transformers' templates.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(source).environment
    tree = environment.parse(source)
    variables = meta.find_undeclared_variables(tree) - environment.globals.keys()
    return _Template(frozenset(variables), _loops(tree))


def _loops(tree: nodes.Template) -> bool:
    """Whether a template loops over the parts of a message's content; changes the names of macros' parameters.

    Follows the messages through assignments, loops and macros.
    """
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for macro in macros.values():
        own = {parameter.name for parameter in macro.args}
        for mention in macro.find_all(nodes.Name):
            if mention.name in own:
                mention.name = f"{macro.name}.{mention.name}"
    known: defaultdict[str, set[str]] = defaultdict(set, {"messages": {"messages"}})

    def what(node: nodes.Node | None) -> set[str]:
        """What an expression may be: "messages", a "message", its "content"."""
        match node:
            case nodes.Name():
                return known[node.name]
            case nodes.Filter() | nodes.Getitem(arg=nodes.Slice()):
                return what(node.node)
            case nodes.CondExpr():
                return what(node.expr1) | what(node.expr2)
            case nodes.And() | nodes.Or():
                return what(node.left) | what(node.right)
            case nodes.Getattr(attr=key) | nodes.Getitem(arg=nodes.Const(value=key)):
                return _item(what(node.node), key)
            case nodes.Call(node=nodes.Getattr(node=owner, attr="get"), args=[nodes.Const(value=key), *_]):
                return _item(what(owner), key)
        return set()

    def flows() -> Iterator[tuple[str, set[str]]]:
        """Names, and what is given to them."""
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name):
                yield assign.target.name, what(assign.node)
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name) and "messages" in what(loop.iter):
                yield loop.target.name, {"message"}
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                macro = macros[call.node.name]
                yield from ((target.name, what(value)) for target, value in zip(macro.args, call.args, strict=False))
                yield from ((f"{macro.name}.{given.key}", what(given.value)) for given in call.kwargs)

    news = True
    while news:
        news = False
        for name, found in list(flows()):
            if not found <= known[name]:
                known[name] |= found
                news = True
    return any("content" in what(loop.iter) for loop in tree.find_all(nodes.For))


def _item(owner: set[str], key: object) -> set[str]:
    """What an item of something may be."""
    found = set()
    if "messages" in owner and isinstance(key, int):
        found.add("message")
    if "message" in owner and key == "content":
        found.add("content")
    return found


def _message(message: object, as_parts: bool) -> dict[str, Any]:
    """A message for a template: content as text or parts, arguments of tools as values, reasoning by both names."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"a message is a mapping, such as {{'role': 'user', 'content': ...}}; this is {shown(message)}",
            param=_MESSAGES,
        )
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"a message has the role {shown(role)}; give text, such as 'user'", param=_MESSAGES)
    parts = list(_parts(message.get("content")))
    # As in vLLM: templates expect what a tool says as text, whatever they expect of others.
    content = parts if as_parts and role != "tool" else "\n".join(part["text"] for part in parts if part["text"])
    # Without fields that are null, which templates would write: transformers drops them only from 5.23 on.
    fields = {key: value for key, value in message.items() if value is not None and (value or key not in CALLS)}
    if role == "assistant":
        if "tool_calls" in fields:
            _check_list("tool_calls of a message is a list of calls", fields["tool_calls"])
            fields["tool_calls"] = [_call(call) for call in fields["tool_calls"]]
        reasoning = fields.get("reasoning")
        if reasoning is None:
            reasoning = fields.get("reasoning_content")
        if reasoning is not None:
            # As in vLLM: some templates read the one, some the other.
            fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return {**fields, "content": content}


def _call(call: object) -> object:
    """A call of a tool; its arguments are a mapping for templates, and JSON in OpenAI's shape."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        # As in vLLM: what a model once wrote is in the conversation for good, which has to go on.
        logger.warning(
            "a tool call of %s has arguments that are no JSON object and count as none", shown(function.get("name"))
        )
        arguments = {}
    return {**cast(Mapping[str, Any], call), "function": {**function, "arguments": arguments}}


def _parts(content: object) -> Iterator[dict[str, Any]]:
    """A message's content as parts of type "text"."""
    if content is None:
        return
    if isinstance(content, str):
        content = [content]
    _check_list("a message's content is text, or a list of parts", content)
    for part in cast(Sequence[object], content):
        if isinstance(part, str):
            yield {"type": "text", "text": part}
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise InvalidRequest(
                f"a message has a part of type {shown(kind)}, but the model reads text only; give parts such as "
                "{'type': 'text', 'text': ...}",
                param=_MESSAGES,
            )
        text = cast(Mapping[str, Any], part).get(key)
        if text is None:
            continue
        if not isinstance(text, str):
            raise InvalidRequest(f"a message has a part whose {key} is {shown(text)}; give text", param=_MESSAGES)
        others = {name: value for name, value in cast(Mapping[str, Any], part).items() if name not in ("type", key)}
        yield {**others, "type": "text", "text": text}


def _check_list(what: str, values: object) -> None:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise InvalidRequest(f"{what}; this is {shown(values)}", param=_MESSAGES)
