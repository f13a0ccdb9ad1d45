"""From what `StructuredOutputs` asks for to the state of an output under it.

All of these come from clients, so nothing is taken on trust. A process of its own tries a grammar first, and is killed
if that takes too long or too much memory; so the threads of the engine only compile what is known to compile. While a
request runs, llguidance's limits bound the work per token; a request that reaches them fails alone.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from vattn.errors import VattnError
from vattn.integers import shown

from .grammar import Grammar, GrammarError
from .request import InvalidRequest
from .structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Of processor time, which does not depend on what else runs.
_SECONDS = 5.0  # until a grammar counts as too complex
_START_SECONDS = 60.0  # until the process that tries grammars has read a tokenizer
_MOST_SECONDS = 600.0  # until an answer, however little processor time the process gets
# What ends the process from outside, such as the kernel where memory is short. A grammar ends it otherwise.
_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP})
_MOST_CHARACTERS = 2**18
_COMPILED_KEPT = 16
_KEPT_CHARACTERS = 2**18  # of all that are kept: a compiled grammar takes up to 150 bytes of memory for each
# In JSON. With no bound, a small model writes nothing else.
_WHITESPACE = r"( |\n[ \t]{0,32})"
# The lexer's and the parser's work for one token: tens of milliseconds at most.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


class GrammarsUnavailable(VattnError):
    """There is no process that tries grammars, or it was ended from outside; later requests may find one."""


class GrammarCompiler:
    """Grammars for one model. Any thread may use it.

    Args:
        vocab_size: token ids of the model: `0 .. vocab_size - 1`.
        eos_token_ids: tokens that may end an output wherever its grammar lets it end.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        known = 0 if tokenizer is None else len(tokenizer)
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._special_tokens = {token.content for token in added.values() if token.special}
        self._eos_token_ids = [token for token in sorted(eos_token_ids) if token < known]
        self._compiling = threading.Lock()
        self._trial: _Trial | None = None
        self._closes = 0  # calls of `close`
        self._read: LLTokenizer | None = None
        self._ends = np.empty(0, dtype=np.int64)
        self._looking_up = threading.Lock()
        self._compiled: OrderedDict[tuple[str, bool], Grammar | str] = OrderedDict()  # or what is wrong with it

    def compile(self, wanted: StructuredOutputs, *, ignore_eos: bool, stop_token_ids: Collection[int] = ()) -> Grammar:
        """The state at the beginning of an output.

        Args:
            ignore_eos: end-of-sequence tokens do not end it.
            stop_token_ids: tokens that end it wherever its grammar lets it end.

        Raises:
            InvalidRequest: llguidance is missing, the tokenizer's tokens are not known as bytes, or what is wanted is
                invalid, too complex, or cannot be enforced.
            GrammarsUnavailable: there is no process to try it.
        """
        text = _source(wanted, self._special_tokens)
        found = self._look_up(text, ignore_eos)
        if found is None:
            with self._compiling:
                found = self._look_up(text, ignore_eos)
                if found is None:
                    found = self._compile(text, ignore_eos)
                    with self._looking_up:
                        self._compiled[text, ignore_eos] = found
                        while len(self._compiled) > 1 and (
                            len(self._compiled) > _COMPILED_KEPT
                            or sum(len(kept) for kept, _ in self._compiled) > _KEPT_CHARACTERS
                        ):
                            self._compiled.popitem(last=False)
        if isinstance(found, str):
            raise _refused(f"structured_outputs cannot be used: {found}")
        return found.fork(stop_token_ids)

    def is_compiled(self, wanted: StructuredOutputs, *, ignore_eos: bool) -> bool:
        """Whether `compile` has its answer already, so that it waits for no other grammar."""
        try:
            return self._look_up(_source(wanted, self._special_tokens), ignore_eos) is not None
        except InvalidRequest:
            return True

    def close(self) -> None:
        """End the process that tries grammars, also in the midst of one; the next `compile` would start another one."""
        self._closes += 1
        if self._compiling.acquire(blocking=False):
            try:
                if self._trial is not None:
                    self._trial.close()
                    self._trial = None
            finally:
                self._compiling.release()
        elif (trial := self._trial) is not None:
            trial.kill()

    def _look_up(self, text: str, ignore_eos: bool) -> Grammar | str | None:
        with self._looking_up:
            if (text, ignore_eos) in self._compiled:
                self._compiled.move_to_end((text, ignore_eos))
            return self._compiled.get((text, ignore_eos))

    def _compile(self, text: str, ignore_eos: bool) -> Grammar | str:
        """The state at the beginning, or what is wrong with the grammar."""
        from llguidance import LLMatcher, LLParserLimits

        closes = self._closes
        tokenizer = self._start()
        assert self._trial is not None
        try:
            tried = self._trial.compile(text) if self._closes == closes else None
        except GrammarsUnavailable:
            if self._closes == closes:
                raise
        if self._closes != closes:
            self._trial.close()
            raise GrammarsUnavailable("the engine is being closed")
        if tried is None:
            return f"it takes more than {_SECONDS:g} s, or too much memory, to compile; simplify it"
        error, text = tried
        if error:
            return error
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**_LIMITS))
        may_end = not ignore_eos and bool(self._eos_token_ids)
        try:
            found = Grammar(matcher, self._vocab_size, self._ends, may_end=may_end)
        except GrammarError as refused:
            return str(refused)
        return "only the empty output has that form" if found.complete else found

    def _start(self) -> LLTokenizer:
        """The tokenizer as llguidance reads it, once a process is there to try grammars."""
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._tokenizer is None or backend is None:
            raise _refused(
                "structured_outputs needs a tokenizer of the Rust library `tokenizers`, which this LLM does not have"
            )
        # Without one, the bit of a special token, which no grammar has, says where the output may end.
        marks = self._eos_token_ids or sorted(self._tokenizer.all_special_ids)[:1]
        if not marks:
            raise _refused("structured_outputs needs a tokenizer with an end-of-sequence or other special token")
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
        n_vocab = max(self._vocab_size, len(self._tokenizer))
        arguments: tuple[str, int, list[int]] = (backend.to_str(), n_vocab, marks)
        if self._read is None:
            try:
                self._read = LLTokenizer(arguments[0], n_vocab=n_vocab, eos_token=marks)
            except ValueError as error:
                raise _refused(
                    "structured_outputs needs a tokenizer whose tokens are known as bytes (byte-level, or with byte "
                    f"fallback): {error}"
                ) from None
            self._ends = np.array([token for token in marks if token < self._vocab_size], dtype=np.int64)
        if self._trial is None or not self._trial.usable:
            self._trial = _Trial(arguments)
        return self._read


class _Trial:
    """The process that tries grammars; it ends with this object."""

    def __init__(self, arguments: tuple[str, int, list[int]]) -> None:
        self._pid = os.getpid()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("grammar_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C in a terminal is the engine's alone
            )
        except OSError as error:
            raise GrammarsUnavailable(f"the process that tries grammars could not be started: {error}") from error
        self.close = weakref.finalize(self, _end, self._process, self._pid)
        if self._ask([*arguments, _LIMITS], _START_SECONDS) is None:
            raise GrammarsUnavailable("the process that tries grammars did not start; try again later")

    @property
    def usable(self) -> bool:
        """Whether it lives, and is a child of this process and not of the one that this one was forked from."""
        return self._pid == os.getpid() and self._process.poll() is None

    def kill(self) -> None:
        """End the process, from any thread; the one that waits for its answer gets none."""
        if self._pid == os.getpid():
            self._process.kill()

    def compile(self, grammar: str) -> tuple[str, str] | None:
        """What is wrong with a grammar, "" for nothing, and the grammar as llguidance takes it.

        Returns:
            None if trying it was too much, which ends the process.

        Raises:
            GrammarsUnavailable: as `_ask`.
        """
        answer: tuple[str, str] | None = self._ask(grammar, _SECONDS)
        return answer

    def _ask(self, question: object, seconds: float) -> Any:
        """The answer; None if it took so many seconds of processor time, or the question ended the process.

        Raises:
            GrammarsUnavailable: the process was ended from outside, or got too little processor time to answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        stdin, stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        unsent = memoryview(json.dumps(question).encode() + b"\n")
        answer = b""
        left = seconds
        try:
            over = _processor_seconds(self._process.pid) + seconds
            end = time.monotonic() + _MOST_SECONDS
            while left > 0 and time.monotonic() < end and not answer.endswith(b"\n"):
                readable, writable, _ = select.select([stdout], [stdin] if unsent else [], [], max(left, 0.01))
                if writable:
                    unsent = unsent[os.write(stdin, unsent[: select.PIPE_BUF]) :]  # so much never waits
                elif not readable:
                    left = over - _processor_seconds(self._process.pid)
                elif piece := os.read(stdout, 2**16):
                    answer += piece
                else:
                    break
        except BrokenPipeError:
            pass
        except BaseException:  # the answer would be taken for the next question's
            self.close()
            raise
        if answer.endswith(b"\n"):
            return json.loads(answer)
        self.close()
        if left > 0 and self._process.returncode in _FROM_OUTSIDE:
            raise GrammarsUnavailable("the process that tries grammars was ended, or got no processor; try again later")
        return None


def _processor_seconds(pid: int) -> float:
    """Processor time that a child has taken, in seconds."""
    with open(f"/proc/{pid}/stat") as stat:
        times = stat.read().rpartition(")")[2].split()[11:13]  # behind the name: its own, and the kernel's for it
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _end(process: subprocess.Popen[bytes], pid: int) -> None:
    if pid == os.getpid():
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="structured_outputs")


def _source(wanted: StructuredOutputs, special_tokens: Collection[str]) -> str:
    """What llguidance compiles; a grammar in EBNF, which `grammar_worker` translates, as it is."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise _refused(
            "structured_outputs needs llguidance, which is not installed: pip install 'vattn[structured]'"
        ) from None
    source = str(wanted.json or wanted.regex or wanted.grammar or wanted.structural_tag or "".join(wanted.choice or ()))
    if len(source) > _MOST_CHARACTERS:
        raise _refused(f"structured_outputs has {len(source)} characters; it can have at most {_MOST_CHARACTERS}")
    if wanted.json is not None or wanted.json_object:
        schema = source if wanted.json is not None else '{"type": "object"}'
        try:
            return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
        except ValueError as error:
            raise _refused(f"structured_outputs cannot be used: {error}") from None
    if wanted.grammar is not None:
        return wanted.grammar
    if wanted.structural_tag is not None:
        return _tagged(source, special_tokens)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    return LLMatcher.grammar_from_regex("|".join(map(_quoted, wanted.choice or ())))


def _tagged(structural_tag: str, special_tokens: Collection[str]) -> str:
    """A grammar for text with these tags in it."""
    from llguidance import StructTag

    found = json.loads(structural_tag)
    tags = []
    for structure in found["structures"]:
        trigger = next(trigger for trigger in found["triggers"] if structure["begin"].startswith(trigger))
        schema = {"x-guidance": {"whitespace_pattern": _WHITESPACE}, **structure["schema"]}
        tags.append(StructTag(trigger=trigger, begin=structure["begin"], grammar=schema, end=structure["end"]))
    # llguidance may take triggers such as <tool> for special tokens: all of them, or none.
    looks_special = {tag.trigger for tag in tags if tag.trigger.startswith("<") and tag.trigger.endswith(">")}
    special = looks_special & set(special_tokens)
    if special and special != looks_special:
        raise _refused(
            f"structured_outputs cannot be used: of its triggers, {shown(min(special))} is a special token and "
            f"{shown(min(looks_special - special))} is none; use triggers of one kind"
        )
    return StructTag.to_grammar(tags, assume_special=bool(special))


def _quoted(text: str) -> str:
    """A regular expression for just this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
