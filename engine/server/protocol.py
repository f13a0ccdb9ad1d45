"""The bodies of requests and answers, as OpenAI and vLLM name their fields.

Lists fail at their first wrong value: a body of millions of them must not become millions of errors.

A field that is null counts as absent. Fields that are not listed are accepted and have no effect; those in `REFUSED`
would change the output, and are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, WithJsonSchema

# A request for more completions than this, of all its prompts together, is refused.
MOST_COMPLETIONS = 4096
MOST_CHOICES = 128
MOST_MESSAGES = 16384
MOST_LOGPROBS = 20

# Each stop string is looked for in every token's text.
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Stops = Annotated[list[StopText], Field(max_length=64, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**63)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_COMPLETIONS, fail_fast=True)]
Several = Annotated[list[Tokens], Field(min_length=1, max_length=MOST_COMPLETIONS, fail_fast=True)]


def _form(prompt: Any) -> str | None:
    """The form that a prompt has, by its first part; so that it is checked, and its errors told, for this form only."""
    if not isinstance(prompt, list):
        return "str()" if isinstance(prompt, str) else None
    if not prompt or not isinstance(prompt[0], str | list):
        return "list[int]"
    return "list[str]" if isinstance(prompt[0], str) else "list[list[int]]"


Prompts = Annotated[
    Annotated[str, Tag("str()")]
    | Annotated[Tokens, Tag("list[int]")]
    | Annotated[Texts, Tag("list[str]")]
    | Annotated[Several, Tag("list[list[int]]")],
    Discriminator(
        _form,
        custom_error_type="prompt_type",
        custom_error_message="Input should be text, a list of texts, a list of token ids, or a list of such lists",
    ),
]
# Checked by hand, since pydantic would list every wrong value of a dict.
Biases = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]

REFUSED = {
    "suffix": "text is not inserted before a suffix; put it into the prompt",
    "tools": "tool calls are not supported; describe the tools in a message, and parse the answer",
    "functions": "function calls are not supported; describe the functions in a message, and parse the answer",
    "function_call": "function calls are not supported",
    "audio": "the model reads and writes text only",
    "web_search_options": "the server has no web search",
    "use_beam_search": "beam search is offered by vattn.engine.LLM.beam_search only",
    "chat_template": "the chat template is the server's; it is set by --chat-template",
    "reasoning_effort": "send what the chat template knows in chat_template_kwargs",
    "return_tokens_as_token_ids": "use return_token_ids",
    "lora_request": "there is one model, without adapters",
    "documents": "documents are not supported; put their text into a message",
    "guided_json": "use response_format",
    "guided_regex": "use response_format",
    "guided_choice": "use response_format",
    "guided_grammar": "use structured_outputs",
    "guided_whitespace_pattern": "use structured_outputs, with a grammar",
    "prompt_embeds": "prompts are text or token ids",
    "mm_processor_kwargs": "the model reads text only",
    "logits_processors": "functions cannot be sent; use logit_bias or allowed_token_ids",
    "logprob_token_ids": "log probabilities are those of the most likely tokens; use logprobs",
    "thinking_token_budget": "thinking counts as any output; use max_tokens",
    "repetition_detection": "repetitions end no request; use stop or max_tokens",
    "watermarking": "outputs have no watermark",
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(_Body):
    """`text`, or the form that the output must have."""

    type: Literal["text", "json_object", "json_schema", "regex", "choice"]
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None


class Sampling(_Body):
    """What completions and chats have in common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-30, le=1e30)] | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: Annotated[list[StopText], Field(max_length=256, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Stops | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    user: str | None = None

    @property
    def max_tokens_field(self) -> str:
        """The field that has the body's `max_tokens`, for errors."""
        return "max_tokens"

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        return self.usage_in_stream and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(Sampling):
    prompt: Prompts
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None


class Message(_Body):
    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class Templated(_Body):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(Sampling, Templated):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tool_choice: Any = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class TokenizeRequest(Templated):
    """A prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: TokenIds


class GenerateRequest(Sampling):
    prompt: str
    add_special_tokens: bool | None = None


# Answers. They are written by hand, since that takes less time than a model; tests hold them to these.


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprobs]


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str


class GenerateResponse(BaseModel):
    text: list[str]


class VersionResponse(BaseModel):
    version: str


class LoadResponse(BaseModel):
    server_load: int


class SleepingResponse(BaseModel):
    is_sleeping: bool
