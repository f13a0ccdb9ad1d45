"""What clients may send to a server: valid, borderline and hostile requests, and manners of sending them.

Each is drawn from a `random.Random` of its own, so that a number brings it back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_MODEL_LEN = 2048
VOCABULARY = 1536
MOST_BYTES = 4 * 2**20
MOST_VALUES = 2**18

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = (COMPLETE, CHAT, "/generate")
OTHERS = ("/tokenize", "/detokenize")
# Bodies to which a member is to be added.
SHORT = b'{"prompt":"a","max_tokens":1,'
SHORT_CHAT = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,'
OK = frozenset({200})
BAD = frozenset({400})
EITHER = frozenset({200, 400, 503})


@dataclass
class Attack:
    """One request, and how it is sent.

    Attributes:
        kind: for the counts.
        data: the bytes of the request; `pieces` of it are sent with `pause` seconds between them.
        leave: seconds after the last piece at which the client closes the connection; None for after the answer.
        half: the client closes its sending side first.
        stall: seconds before the client begins to read.
        statuses: those that the answer may have; empty where no answer is possible, or any is right.
        code: of the error that is the answer; None where it is not known.
        check: looks at a body of status 200; raises AssertionError.
        heavy: is measured alone now and then.
    """

    kind: str
    data: bytes
    statuses: frozenset[int]
    pieces: int = 1
    pause: float = 0.0
    leave: float | None = None
    half: bool = False
    stall: float = 0.0
    code: str | None = None
    check: Callable[[dict[str, Any]], None] | None = None
    heavy: bool = False
    number: int = field(default=0, compare=False)


def draw(number: int, key: str | None) -> Attack:
    """The attack with this number; `key` is one that the server knows."""
    rng = random.Random(number)
    weights = [weight for _, weight in KINDS.values()]
    (name,) = rng.choices(list(KINDS), weights)
    attack = KINDS[name][0](rng, key)
    attack.kind = f"{name}: {attack.kind}" if attack.kind else name
    attack.number = number
    return attack


def http(
    path: str, content: bytes, key: str | None, *, version: str = "1.1", headers: str = "", chunk: int | None = None
) -> bytes:
    """A POST of JSON."""
    head = f"POST {path} HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n{headers}"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    if chunk is None:
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    chunks = [content[start : start + chunk] for start in range(0, len(content), chunk)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks)
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + body + b"0\r\n\r\n"


def post(path: str, body: Any, key: str | None, **how: Any) -> bytes:
    """As `http`, of a value."""
    return http(path, json.dumps(body).encode(), key, **how)


def asked(rng: random.Random, path: str, text: Any, **fields: Any) -> dict[str, Any]:
    """A body for a path, about a text."""
    if path == CHAT:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    elif path == "/detokenize":
        return {"tokens": [rng.randrange(VOCABULARY) for _ in range(10)], **fields}
    else:
        body = {"prompt": text}
    if path in GENERATE:
        body["max_tokens"] = rng.choice([1, 4, 16])
        body["stream"] = rng.random() < 0.5
        if body["stream"] and path == "/generate":
            body["stream"] = False
    return {**body, **fields}


def path_of(rng: random.Random, *paths: str) -> str:
    return rng.choice(paths or (*GENERATE, *OTHERS))


# -- valid ---------------------------------------------------------------------------------------------------------


def valid(rng: random.Random, key: str | None) -> Attack:
    path = path_of(rng)
    text = rng.choice(["Question: What is 17 + 25?\nAnswer:", "w", "é\u4e2d\U0001f600", "a " * rng.randint(1, 300)])
    fields: dict[str, Any] = {}
    if path in GENERATE:
        for name, values in {
            "temperature": [0, 0.7, 1.0, 1e-9, 1e6],
            "top_p": [0.1, 1],
            "top_k": [-1, 1, 5, 10**6],
            "seed": [0, -(2**63), 2**63 - 1],
            "stop": ["x", ["a", "b" * 1024]],
            "ignore_eos": [True],
            "min_tokens": [0, 1],
            "presence_penalty": [-2, 2],
            "repetition_penalty": [0.5, 2],
            "logit_bias": [{"5": 100}, {}],
            "allowed_token_ids": [[5, 6]],
            "cache_salt": ["a", "\u4e2d"],
            "return_token_ids": [True],
            "user": ["somebody"],
            "bad_words": [["the", " a"]],
            "truncate_prompt_tokens": [1, -1],
        }.items():
            if rng.random() < 0.15:
                fields[name] = rng.choice(values)
        if fields.get("temperature") != 0 and rng.random() < 0.2:
            fields |= {"n": rng.choice([1, 2, 8]), "temperature": 1}
        if path != "/generate" and rng.random() < 0.2:
            fields |= {"logprobs": 3} if path == COMPLETE else {"logprobs": True, "top_logprobs": 3}
    chunk = rng.choice([None, None, 1, 7, 1000])
    return Attack(path, post(path, asked(rng, path, text, **fields), key, chunk=chunk), OK | {503}, check=_is_whole)


def _is_whole(answer: dict[str, Any]) -> None:
    assert answer, "an empty answer"


def salted(rng: random.Random, key: str | None) -> Attack:
    """A prompt that others compute under another salt: nothing of it may be found in the cache."""
    body = {"prompt": SECRET, "max_tokens": 1, "cache_salt": f"salt {rng.random()}"}

    def check(answer: dict[str, Any]) -> None:
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "a prefix of another salt was found"

    return Attack("", post(COMPLETE, body, key), OK | {503}, check=check)


SECRET = "Question: " + " ".join(str(number) for number in range(700, 900)) + "\nAnswer:"


# -- sizes ---------------------------------------------------------------------------------------------------------


def long_text(rng: random.Random, key: str | None) -> Attack:
    size = rng.choice([10_000, 20_480, 20_481, 100_000, 10**6, MOST_BYTES - 200])
    name, unit = rng.choice(
        [
            ("words", "hello "),
            ("letters", "a"),
            ("spaces", " "),
            ("lines", "\n"),
            ("emoji", "\U0001f600"),
            ("kanji", "\u4e2d"),
            ("quotes", '"'),
            ("backslashes", "\\"),
            ("commas", ","),
            ("specials", "<|end|>"),
            ("zeros", "\0"),
            ("digits", "7"),
        ]
    )
    path = path_of(rng, *GENERATE, "/tokenize")
    written = json.dumps(unit, ensure_ascii=rng.random() < 0.5)[1:-1].encode()
    text = written * (size // len(written))
    before = b'{"messages":[{"role":"user","content":"' if "chat" in path else b'{"prompt":"'
    after = b'"}],"max_tokens":1}' if "chat" in path else b'","max_tokens":1}'
    if "chat" in path and rng.random() < 0.3:
        before, after = before[:-1] + b'[{"type":"text","text":"', b'"}]' + after[1:]
    return Attack(f"{name} to {path}", http(path, before + text + after, key), EITHER, heavy=True)


def many(rng: random.Random, key: str | None) -> Attack:
    """Values, a few below and above what is possible, and far more."""
    count = rng.choice([100, 4096, 4097, 16_384, 16_385, 50_000, MOST_VALUES - 8, MOST_VALUES + 8, 10**6])
    name, path, before, unit, after = rng.choice(
        [
            ("messages", CHAT, b'{"messages":[', b'{"role":"user","content":"a"}', b'],"max_tokens":1}'),
            ("parts", CHAT, b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]}"),
            ("messages to count", "/tokenize", b'{"messages":[', b'{"role":"user","content":"a"}', b"]}"),
            ("ids", COMPLETE, b'{"max_tokens":1,"prompt":[', b"7", b"]}"),
            ("large ids", COMPLETE, b'{"max_tokens":1,"prompt":[', b"1" * 300, b"]}"),
            ("prompts", COMPLETE, b'{"max_tokens":1,"prompt":[', b'"a"', b"]}"),
            ("prompts of ids", COMPLETE, b'{"max_tokens":1,"prompt":[', b"[7]", b"]}"),
            ("ids to text", "/detokenize", b'{"tokens":[', b"1500", b"]}"),
            ("allowed ids", COMPLETE, SHORT + b'"allowed_token_ids":[', b"5", b"]}"),
            ("stop ids", COMPLETE, SHORT + b'"stop_token_ids":[', b"5", b"]}"),
            ("stops", COMPLETE, SHORT + b'"stop":[', b'"xyz"', b"]}"),
            ("unknown values", COMPLETE, SHORT + b'"unknown":[', b"{}", b"]}"),
            ("choices", COMPLETE, SHORT + b'"structured_outputs":{"choice":[', b'"a"', b"]}}"),
            ("texts without a comma", COMPLETE, b'{"prompt":"a","unknown":[', b'"a"' * 20, b"]}"),
        ]
    )
    count = min(count, (MOST_BYTES - 200) // (len(unit) + 1))
    return _sized(name, http(path, before + b",".join([unit] * count) + after, key), count)


def _sized(name: str, data: bytes, values: int) -> Attack:
    """A request whose body has at least so many values."""
    if values > MOST_VALUES:
        return Attack(name, data, BAD, code="too_many_values", heavy=True)
    return Attack(name, data, EITHER, heavy=True)


def many_names(rng: random.Random, key: str | None) -> Attack:
    count = rng.choice([100, 10_000, 131_000, 200_000])
    members = b",".join(b'"%d":1' % i for i in range(count))[: MOST_BYTES - 1000].rsplit(b",", 1)[0]
    name, path, before, after = rng.choice(
        [
            ("biases", COMPLETE, SHORT + b'"logit_bias":{', b"}}"),
            ("unknown fields", COMPLETE, SHORT + b"", b"}"),
            ("template", CHAT, SHORT_CHAT + b'"chat_template_kwargs":{', b"}}"),
            ("message", CHAT, b'{"messages":[{"role":"user","content":"a",', b"}]}"),
            ("schema", COMPLETE, SHORT + b'"structured_outputs":{"json":{"type":"object","properties":{', b"}}}}"),
        ]
    )
    return _sized(name, http(path, before + members + after, key), 2 * members.count(b":"))


def deep(rng: random.Random, key: str | None) -> Attack:
    depth = rng.choice([50, 500, 990, 1100, 20_000, 10**6])
    opening, closing, name = rng.choice([(b"[", b"]", "lists"), (b'{"a":', b"}", "objects")])
    depth = min(depth, MOST_BYTES // 8)
    inner = opening * depth + (b"1" + closing * depth if rng.random() < 0.7 else b"")
    before, after, path = rng.choice(
        [
            (SHORT + b'"unknown":', b"}", COMPLETE),
            (b'{"max_tokens":1,"prompt":', b"}", COMPLETE),
            (SHORT_CHAT + b'"chat_template_kwargs":{"a":', b"}}", CHAT),
            (b'{"messages":[{"role":"user","content":"a","extra":', b'}],"max_tokens":1}', CHAT),
            (SHORT + b'"structured_outputs":{"json":', b"}}", COMPLETE),
            (b"", b"", "/tokenize"),
        ]
    )
    return Attack(name, http(path, before + inner + after, key), EITHER, heavy=depth > 1000)


def answers(rng: random.Random, key: str | None) -> Attack:
    """Small requests for large answers."""
    too_large: list[dict[str, Any]] = [  # if they are no streams
        {"prompt": "a", "n": 8, "logprobs": 20, "max_tokens": 2000, "temperature": 1},
        {"prompt": [[7] * 2000] * 8, "prompt_logprobs": 20, "max_tokens": 1},
    ]
    drawn = rng.choice(
        [
            *too_large,
            {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 30, "temperature": 1, "ignore_eos": True},
            {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 2000, "temperature": 1},
            {"prompt": "w " * 2000, "n": 32, "echo": True, "max_tokens": 1, "temperature": 1, "return_token_ids": True},
            {"prompt": ["a"] * 300, "max_tokens": 2, "logprobs": 5},
            {"prompt": ["a"] * 4096, "max_tokens": 1},
            {"prompt": "w " * 2000, "logprobs": 20, "echo": True, "max_tokens": 0},
            {"prompt": ["w " * 2000] * 5, "logprobs": 20, "echo": True, "max_tokens": 1},
            {"prompt": "a", "n": 64, "max_tokens": 30, "temperature": 1, "ignore_eos": True},
        ]
    )
    how = rng.choice(["whole", "stream", "gone", "stalled"])
    body = {**drawn, "stream": how != "whole" and "prompt_logprobs" not in drawn}
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    attack = Attack(how, post(COMPLETE, body, key), EITHER, heavy=how != "gone")
    if drawn in too_large and not body["stream"]:
        attack.statuses, attack.code = BAD, "too_many_logprobs"
    if how == "gone":
        attack.leave = rng.choice([0.0, 0.05, 0.5])
        attack.statuses, attack.code = frozenset(), None
    if how == "stalled":
        attack.stall = 1.0
    return attack


def grammars(rng: random.Random, key: str | None) -> Attack:
    count = rng.choice([10, 300, 2000])

    def one(i: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"key{i}": {"type": "string"}}, "required": [f"key{i}"]}

    name, form = rng.choice(
        [
            ("anyOf", {"json": {"anyOf": [one(i) for i in range(count)]}}),
            ("properties", {"json": {"type": "object", "properties": {f"key{i}": one(i) for i in range(count)}}}),
            ("enum", {"json": {"enum": [f"value {i}" for i in range(count * 5)]}}),
            ("choice", {"choice": [f"value {i}" for i in range(count * 5)]}),
            ("regex", {"regex": "(a|b|cd)*" * count}),
            ("counted", {"regex": "([a-z]{1,999}){1,999}"}),
            ("long counted", {"regex": "[a-z0-9]{1,100000}x"}),
            ("recursive", {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}}}),
            ("lark", {"grammar": 'start: a\na: a a | "x"'}),
            ("ebnf", {"grammar": "root ::= " + '"a" ' * count}),
            ("no grammar", {"grammar": "start: ((((" * count}),
            (
                "tags",
                {
                    "structural_tag": {
                        "structures": [{"begin": "<a>", "schema": one(1), "end": "</a>"}] * count,
                        "triggers": ["<a"] * count,
                    }
                },
            ),
            ("nothing", {}),
            ("two", {"regex": "a", "choice": ["a"]}),
        ]
    )
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 8, "n": rng.choice([1, 4]), "structured_outputs": form}
    if "json" in form and rng.random() < 0.5:
        schema = {"name": "a", "schema": body.pop("structured_outputs")["json"]}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return Attack(name, post(COMPLETE, body, key), EITHER, heavy=True)


def words(rng: random.Random, key: str | None) -> Attack:
    body = rng.choice(
        [
            {"stop": ["a" * 1023 + c for c in "bcdefghijk"] * 6, "logit_bias": {"66": 100}},
            {"stop": ["x" * 1024] * 65},
            {"bad_words": [f"word {i} " * 90 for i in range(256)]},
            {"bad_words": ["a" * 1024] * 256, "prompt": ["a"] * 300, "max_tokens": 1},
            {"logit_bias": {str(i): 1 for i in range(VOCABULARY)}, "allowed_token_ids": list(range(VOCABULARY))},
            {"stop_token_ids": list(range(VOCABULARY)), "n": 128, "min_tokens": 3},
            {"logit_bias": {str(i): 1 for i in range(VOCABULARY)}, "n": 64},
            {"allowed_token_ids": list(range(VOCABULARY)), "n": 64},
        ]
    )
    body = {"prompt": "a", "max_tokens": 8, "temperature": 1, **body}
    return Attack("", post(COMPLETE, body, key), EITHER)


# -- values --------------------------------------------------------------------------------------------------------


NUMBERS = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-0",
    b"-0.0",
    b"1e-400",
    b"0.1e1",
    b"1.0",
    b"9" * 30,
    b"9" * 641,
    b"-" + b"9" * 5000,
    b"9" * 100_000,
    b"0." + b"3" * 100_000,
    b"1e" + b"9" * 5000,
    b"[" + b"9" * 640 + b"]",
    b"01",
    b"+1",
    b".5",
    b"0x10",
    b"true",
    b"false",
    b"null",
    b'""',
    b'"1"',
    b"[]",
    b"{}",
    b"[[]]",
    b"[null]",
    b'{"a":1}',
    b"-1",
    b"2147483648",
    b"9223372036854775807",
    b"9223372036854775808",
    b'"' + b"x" * 70_000 + b'"',
    b'"\\ud800"',
    b'"\\u0000"',
]
FIELDS = [
    *(
        "prompt",
        "messages",
        "model",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stream_options",
        "temperature",
    ),
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "bad_words", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    *(
        "min_tokens",
        "skip_special_tokens",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "priority",
        "cache_salt",
        "user",
    ),
    *(
        "return_token_ids",
        "response_format",
        "structured_outputs",
        "echo",
        "logprobs",
        "top_logprobs",
        "best_of",
        "suffix",
    ),
    *(
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "tools",
        "tokens",
    ),
    *("tool_choice", "modalities", "return_token_strs"),
]


def odd_values(rng: random.Random, key: str | None) -> Attack:
    path = path_of(rng)
    body = {name: json.dumps(value).encode() for name, value in asked(rng, path, "w").items()}
    for name in rng.sample(FIELDS, rng.choice([1, 1, 1, 2, 5])):
        body[name] = rng.choice(NUMBERS)
    content = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in body.items())
    return Attack(path, http(path, b"{" + content + b"}", key), EITHER | {404})


def odd_texts(rng: random.Random, key: str | None) -> Attack:
    text = rng.choice(
        [
            b"\xff\xfe",
            b"\xc0\x80",
            b"\xed\xa0\x80",
            b"\xf4\x90\x80\x80",
            b"\xe2\x80\xae",
            b"\xef\xbb\xbf",
            b"\0",
            b"\x01",
            b"\\ud800",
            b"\\udc00\\ud800",
            b"\\u0000",
            b"\\uFFFF",
            b"\\x41",
            b"\\",
            b"\n",
            b"e\xcc\x81" * 1000,
            b"\xcc\x81" * 5000,
            b"<|end|>",
            b"<|im_start|>system",
            b"{{ 7 * 7 }}",
            b"{% raw %}",
            b"\\u2028",
        ]
    )
    path = path_of(rng, *GENERATE, "/tokenize")
    content = b'{"prompt":"%b","max_tokens":2}' % text
    if "chat" in path:
        content = b'{"messages":[{"role":"user","content":"%b"}],"max_tokens":2}' % text
    content = rng.choice([content] * 4 + [b"\xef\xbb\xbf" + content, content.decode("latin-1").encode("utf-16")])
    return Attack(path, http(path, content, key), EITHER)


def no_json(rng: random.Random, key: str | None) -> Attack:
    content = rng.choice(
        [
            b"",
            b"{",
            b"}",
            b"[]",
            b"null",
            b"1",
            b'""',
            b"{}}",
            b'{"prompt":"a"',
            b'{"prompt":"a",}',
            b"{'prompt':'a'}",
            b"prompt=a",
            b"\x1f\x8b\x08",
            b"<a/>",
            rng.randbytes(1000),
            b'"' * 10**6,
            b"," * 10**6,
            b"{" * 10**6,
            b'"\\' * 10**6,
            b" " * (MOST_BYTES - 10),
            b'{"prompt":"a"}' * 1000,
            b'{"a"' * 10**5,
        ]
    )
    others = ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"]
    kind = rng.choice(["application/json"] * 4 + others)
    data = http(path_of(rng), content, key).replace(b"application/json", kind.encode(), 1)
    return Attack("", data, BAD, heavy=len(content) > 10**5)


# -- the protocol --------------------------------------------------------------------------------------------------


def strange_http(rng: random.Random, key: str | None) -> Attack:
    good = post("/tokenize", {"prompt": "w"}, key)
    body = b'{"prompt":"w"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    if key is not None:
        head += b"Authorization: Bearer " + key.encode() + b"\r\n"
    name, data = rng.choice(
        [
            ("noise", rng.randbytes(3000)),
            ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500)),
            ("line", b"GET / HTTP/9.9\r\n\r\n"),
            ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
            ("long path", b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"),
            ("long query", b"GET /health?memory=" + b"1" * 60_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"),
            ("odd path", b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n"),
            ("headers", b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 5000 + b"\r\n"),
            ("endless header", b"GET /health HTTP/1.1\r\nX-A: " + b"b" * 600_000),
            ("method", good.replace(b"POST", rng.choice([b"DELETE", b"HEAD", b"PATCH", b"OPTIONS", b"BREW"]), 1)),
            ("two lengths", head + b"Content-Length: 14\r\nContent-Length: 3\r\n\r\n" + body),
            ("length and chunks", head + b"Content-Length: 14\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            ("negative length", head + b"Content-Length: -1\r\n\r\n" + body),
            ("huge length", head + b"Content-Length: 99999999999999999999999\r\n\r\n" + body),
            ("more than allowed", head + b"Content-Length: 9999999\r\n\r\n" + body * 1000),
            ("length too small", head + b"Content-Length: 3\r\n\r\n" + body),
            ("bad chunk", head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
            ("chunk of 2^64", head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n"),
            ("chunks of a byte", http("/tokenize", b'{"prompt":"w","a":"' + b"x" * 60_000 + b'"}', key, chunk=1)),
            (
                "chunks for ever",
                head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"fff\r\n" + b" " * 4095 + b"\r\n") * 1100,
            ),
            ("trailers", http("/tokenize", body, key, chunk=5)[:-2] + b"X-A: " + b"b" * 400_000),
            ("expect", good.replace(b"Host: a\r\n", b"Host: a\r\nExpect: 100-continue\r\n")),
            ("upgrade", good.replace(b"Host: a\r\n", b"Host: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n")),
            ("old", post("/tokenize", {"prompt": "w"}, key, version="1.0")),
            ("ahead", good * rng.choice([2, 50, 3000])),
            (
                "id",
                good.replace(
                    b"Host: a\r\n", b"Host: a\r\nX-Request-Id: %b\r\n" % rng.choice([b"a b", b"\xff", b"x" * 9000])
                ),
            ),
            ("wrong key", post("/tokenize", {"prompt": "w"}, "wrong")),
        ]
    )
    return Attack(name, data, frozenset(), leave=1.0, heavy=len(data) > 10**5)


# -- manners -------------------------------------------------------------------------------------------------------


def slow(rng: random.Random, key: str | None) -> Attack:
    attack = valid(rng, key)
    attack.kind = rng.choice(["a piece at a time", "never whole", "reads late"])
    attack.statuses = frozenset()
    attack.check = None
    if attack.kind == "reads late":
        attack.stall = rng.uniform(0.1, 1.0)
    else:
        attack.pieces, attack.pause = rng.choice([(5, 0.1), (20, 0.02), (3, 0.5)])
        if attack.kind == "never whole":
            attack.data = attack.data[: rng.randrange(len(attack.data))]
            attack.leave = 2.0
    return attack


LONG = {"prompt": "Question: Count to 200.\nAnswer:", "temperature": 0, "max_tokens": 1900, "ignore_eos": True}


def gone(rng: random.Random, key: str | None) -> Attack:
    """Clients that leave: before their request is whole, while it waits, or in the middle of a stream."""
    attack = rng.choice([long_text, many, answers, grammars, valid, valid])(rng, key)
    attack.kind = ""
    if rng.random() < 0.5:
        attack.data = post(COMPLETE, {**LONG, "stream": rng.random() < 0.5, "n": 1}, key)
    if rng.random() < 0.3:
        attack.data = attack.data[: rng.randrange(len(attack.data))]
    attack.statuses, attack.code, attack.check, attack.heavy, attack.stall = frozenset(), None, None, False, 0.0
    attack.leave = rng.choice([0.0, 0.0, 0.01, 0.1, 0.5])
    attack.half = rng.random() < 0.2
    return attack


def long_gone(rng: random.Random, key: str | None) -> Attack:
    """Clients that leave in the midst of what takes longer than to notice it, and are not as simple as others."""
    body = {**LONG, "n": rng.choice([1, 16]), "temperature": 1, "stream": rng.random() < 0.2}
    manner = rng.choice(["half-closed", "ahead"])
    data = post(COMPLETE, body, key) * (2 if manner == "ahead" else 1)
    leave = rng.uniform(0.05, 0.3)
    return Attack(manner, data, frozenset(), leave=leave, half=manner == "half-closed", heavy=True)


def half_closed(rng: random.Random, key: str | None) -> Attack:
    attack = valid(rng, key)
    attack.half = True
    return attack


KINDS: dict[str, tuple[Callable[[random.Random, str | None], Attack], int]] = {
    "valid": (valid, 20),
    "salted": (salted, 4),
    "long text": (long_text, 10),
    "many values": (many, 12),
    "many names": (many_names, 4),
    "deep": (deep, 5),
    "large answer": (answers, 6),
    "grammar": (grammars, 6),
    "words": (words, 3),
    "odd value": (odd_values, 12),
    "odd text": (odd_texts, 6),
    "no JSON": (no_json, 5),
    "HTTP": (strange_http, 10),
    "slow": (slow, 5),
    "gone": (gone, 12),
    "half-closed": (half_closed, 5),
    "long gone": (long_gone, 3),
}
