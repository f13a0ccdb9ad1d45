"""A process that tries out grammars, so that one that exhausts time, memory or the stack ends this process alone.

Reads lines of JSON: first `[tokenizer, n_vocab, eos_token_ids, limits]`, then grammars; answers each of these with what
is wrong, or "", and with the grammar as llguidance takes it. Imports nothing of vattn, so that it starts at once.
"""

from __future__ import annotations

import itertools
import json
import re
import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

# Half of the smallest stack that glibc gives a thread by default, so that no thread of the engine has less.
_STACK_BYTES = 2**20
_GRAMMAR_BYTES = 2**28
_TRIED_TOKENS = 32
# A rule in EBNF: a line of Lark that begins with a name has no `::=` behind it, but in a literal or a comment.
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# Literals, sets of characters and comments match as a whole, so that whatever else matches is a name.
_EBNF_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#.*|[\w-]+')
# In a literal or set: a character by its number, other escapes, and what Lark would not take for itself.
_EBNF_CHARACTER = re.compile(
    r"\\[xuU]((?<=x)[0-9a-fA-F]{2}|(?<=u)[0-9a-fA-F]{4}|(?<=U)[0-9a-fA-F]{8})"
    r"|\\?([\[\]])|\\.|([\0-\x1f\x7f])",
    re.DOTALL,
)


def _serve() -> None:
    vocabulary, n_vocab, eos_token_ids, options = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(vocabulary, n_vocab=n_vocab, eos_token=eos_token_ids)
    limits = LLParserLimits(**options)
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, taken + _GRAMMAR_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    print('""', flush=True)
    for line in sys.stdin:
        print(json.dumps(_try(tokenizer, limits, json.loads(line))), flush=True)


def _limit(what: int, most: int) -> None:
    """Lower a limit of this process."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _try(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> tuple[str, str]:
    if _EBNF_RULE.search(grammar):
        try:
            grammar = gbnf_to_lark(_prepared(grammar))
            grammar.encode()  # which half of a surrogate pair does not survive
        except Exception as error:
            return f"the grammar is no EBNF (llama.cpp's GBNF): {error or type(error).__name__}", grammar
    return _error(tokenizer, limits, grammar), grammar


def _prepared(grammar: str) -> str:
    """A grammar in EBNF that `gbnf_to_lark` converts to what it means.

    A rule `start` has another name, as `root` is to have that one, and characters are written as Lark knows them.
    """
    known = grammar.lower()
    start = next(name for name in map("start{}".format, itertools.count()) if name not in known)

    def written(word: re.Match[str]) -> str:
        text = word[0]
        if text[0] in '"[':
            return text[0] + _EBNF_CHARACTER.sub(_character, text[1:-1]) + text[-1]
        return start if text == "start" else text

    return _EBNF_WORD.sub(written, grammar)


def _character(found: re.Match[str]) -> str:
    """By its number in ASCII, else as it is: of a number of four or eight digits `gbnf_to_lark` drops the zeros."""
    if found.lastindex is None:
        return found[0]
    code = int(found[1], 16) if found[1] else ord(found[found.lastindex])
    return f"\\x{code:02x}" if code < 128 else chr(code)


def _error(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    """What is wrong with a grammar, as far as its first tokens show."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    for _ in range(_TRIED_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.deep_copy().compute_bitmask()
        place = next((i for i, bits in enumerate(mask) if bits), None)
        if place is None:
            break
        bits = mask[place]
        matcher.consume_token(8 * place + (bits & -bits).bit_length() - 1)
    return matcher.get_error()


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
