"""Every mask is compared with what the `regex` module, or a list of all outputs, says can still follow."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import regex
from llguidance import LLMatcher, LLParserLimits
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.paths import ROOT
from tests.support.tiny_models import make_tokenizer
from tests.support.waiting import SECONDS, Background
from vattn.engine import InvalidRequest, StructuredOutputs
from vattn.engine.requests import grammar_compiler
from vattn.engine.requests.grammar import Grammar, GrammarError
from vattn.engine.requests.grammar_compiler import GrammarCompiler
from vattn.engine.server.errors import api_error

pytestmark = pytest.mark.slow(1)

TOKENIZER: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(ROOT / "demo" / "model")
EOS, PAD = 0, 1
PADDED = len(TOKENIZER) + 64  # models have more rows than their tokenizers have tokens


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER, PADDED, [EOS])
    yield compiler
    compiler.close()


def token_texts() -> list[str | None]:
    """The text of each token; None for a special one, and for a part of a character."""
    decoded = [TOKENIZER.decode([token]) for token in range(len(TOKENIZER))]
    return [None if token in (EOS, PAD) or "\ufffd" in text else text for token, text in enumerate(decoded)]


def check_masks(grammar: Grammar, may_begin: Callable[[str], bool], is_whole: Callable[[str], bool], seed: int) -> str:
    """Walk at random through a grammar and compare every mask; returns the text at its end."""
    texts = token_texts()
    rng = np.random.default_rng(seed)
    text = ""
    for _ in range(60):
        assert not grammar.allowed[len(TOKENIZER) :].any(), "tokens that the tokenizer does not have"
        assert not grammar.allowed[PAD]
        possible = {piece for piece in texts if piece is not None and may_begin(text + piece)}
        whole = [token for token, piece in enumerate(texts) if piece is not None and grammar.allowed[token]]
        allowed = {texts[token] or "" for token in whole}
        if allowed != possible:
            # Where only one text can follow, llguidance takes the tokens that a tokenizer would write it with.
            assert len(allowed) == 1, (text, allowed ^ possible)
            [forced] = allowed
            assert forced in possible
            assert all(forced.startswith(piece) or piece.startswith(forced) for piece in possible), (text, possible)
        assert grammar.complete == (not whole)
        assert grammar.allowed[EOS] == is_whole(text)
        if grammar.complete or (grammar.allowed[EOS] and rng.random() < 0.3):
            return text
        token = int(rng.choice(whole))
        grammar.accept(token)
        text += texts[token] or ""
    return text


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "pattern",
    [
        r"[0-9]{3}-[a-z]{1,4}",
        r"(yes|no|maybe)( [A-Z][a-z]+)*",
        r"^a/b\n[^x]{2,6}$",
        r"(ab|abc|b)+c?",
        r"[\w.]+@\w+\.com",
    ],
)
def test_masks_of_a_regular_expression(compiler: GrammarCompiler, pattern: str, seed: int) -> None:
    grammar = compiler.compile(StructuredOutputs(regex=pattern), ignore_eos=False)
    compiled = regex.compile(pattern)
    check_masks(
        grammar,
        lambda text: compiled.fullmatch(text, partial=True) is not None,
        lambda text: compiled.fullmatch(text) is not None,
        seed,
    )


def finite(outputs: list[str]) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    return lambda text: any(output.startswith(text) for output in outputs), lambda text: text in outputs


CHOICES = ["yes", "yes, please", "no", "\\x{61}", "a|b", "1.5 (or [so])", 'a "quoted" line\nand /more/', "$^ #-&~"]


@pytest.mark.parametrize("seed", range(8))
def test_masks_of_choices(compiler: GrammarCompiler, seed: int) -> None:
    grammar = compiler.compile(StructuredOutputs(choice=CHOICES), ignore_eos=False)
    assert check_masks(grammar, *finite(CHOICES), seed) in CHOICES


@pytest.mark.parametrize("seed", range(5))
def test_masks_of_a_schema(compiler: GrammarCompiler, seed: int) -> None:
    """A schema of few values, with every whitespace that may stand between them."""
    schema = {
        "type": "array",
        "prefixItems": [{"enum": [1, 25, "1"]}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    }
    space = r"(?: |\n[ \t]{0,32})?"
    pattern = rf'{space}\[{space}(?:1|25|"1"){space},{space}(?:true|false){space}\]{space}'
    grammar = compiler.compile(StructuredOutputs(json=schema), ignore_eos=False)
    compiled = regex.compile(pattern)
    # llguidance allows whitespace before the first and after the last character nowhere.
    inner = regex.compile(pattern[len(space) : -len(space)])
    text = check_masks(
        grammar,
        lambda text: inner.fullmatch(text, partial=True) is not None,
        lambda text: inner.fullmatch(text) is not None,
        seed,
    )
    assert compiled.fullmatch(text, partial=True)


def test_masks_of_a_context_free_grammar(compiler: GrammarCompiler) -> None:
    """Balanced brackets, which no regular expression describes."""
    grammar = 'start: (round | square)~1..3\nround: "(" start? ")"\nsquare: "[" start? "]"'

    def balanced(text: str) -> tuple[bool, bool]:
        open_brackets = []
        tops = 0
        for c in text:
            if c in "([":
                open_brackets.append([c, 0])
            elif c in ")]" and open_brackets and open_brackets[-1][0] == "(["[")]".index(c)]:
                open_brackets.pop()
                if open_brackets:
                    open_brackets[-1][1] += 1
                tops += not open_brackets
            else:
                return False, False
            counts = [count for _, count in open_brackets[:-1]]
            if any(count > 2 for count in counts) or tops + bool(open_brackets) > 3:
                return False, False
        return True, not open_brackets and 1 <= tops <= 3

    state = compiler.compile(StructuredOutputs(grammar=grammar), ignore_eos=False)
    check_masks(state, lambda text: balanced(text)[0], lambda text: balanced(text)[1], seed=1)


def test_a_fork_goes_its_own_way(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputs(regex="[ab]c[ab]"), ignore_eos=False)
    a, b, c = (TOKENIZER(letter)["input_ids"][0] for letter in "abc")
    grammar.accept(a)
    fork = grammar.fork()
    grammar.accept(c)
    assert (grammar.allowed[a], grammar.allowed[b], grammar.allowed[c]) == (True, True, False)
    assert (fork.allowed[a], fork.allowed[b], fork.allowed[c]) == (False, False, True)


def test_with_ignore_eos_the_end_is_where_nothing_can_follow(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputs(regex="ab?"), ignore_eos=True)
    a, b = (TOKENIZER(letter)["input_ids"][0] for letter in "ab")
    grammar.accept(a)
    assert not grammar.allowed[EOS]
    assert not grammar.complete
    grammar.accept(b)
    assert grammar.complete


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens_are_allowed_where_the_output_may_end(compiler: GrammarCompiler, ignore_eos: bool) -> None:
    a, b, c = (TOKENIZER(letter)["input_ids"][0] for letter in "abc")
    wanted = StructuredOutputs(regex="b?(ab?)*")
    plain = compiler.compile(wanted, ignore_eos=ignore_eos)
    grammar = compiler.compile(wanted, ignore_eos=ignore_eos, stop_token_ids=[PAD, b]).fork()
    for token in (None, b, a, a, b):
        if token is not None:
            for state in (plain, grammar):
                state.accept(token)
        assert {*np.flatnonzero(grammar.allowed)} == {*np.flatnonzero(plain.allowed), PAD, b}
        assert not grammar.complete
    wanted = StructuredOutputs(regex="([ad]b)+c?")
    grammar = compiler.compile(wanted, ignore_eos=ignore_eos, stop_token_ids=[PAD, b])
    ends = set() if ignore_eos else {EOS}
    for token, allowed in ((None, {a}), (a, {b}), (b, {a, c, PAD, b, *ends}), (a, {b})):
        if token is not None:
            grammar.accept(token)
        assert allowed == {*np.flatnonzero(grammar.allowed)} & {a, b, c, EOS, PAD}
    assert not compiler.compile(wanted, ignore_eos=ignore_eos).allowed[PAD], "the next request has no such token"


def test_without_an_end_of_sequence_token_no_special_token_is_allowed() -> None:
    """But stop tokens, also the one whose bit says where the output may end."""
    compiler = GrammarCompiler(TOKENIZER, PADDED, [])
    try:
        grammar = compiler.compile(StructuredOutputs(regex="ab*"), ignore_eos=False)
        grammar.accept(TOKENIZER("a")["input_ids"][0])
        assert not grammar.allowed[[EOS, PAD]].any()
        assert not grammar.complete
        for stop, other in ((EOS, PAD), (PAD, EOS)):
            grammar = compiler.compile(StructuredOutputs(regex="ab*"), ignore_eos=False, stop_token_ids=[stop])
            assert not grammar.allowed[[EOS, PAD]].any()
            grammar.accept(TOKENIZER("a")["input_ids"][0])
            assert [grammar.allowed[stop], grammar.allowed[other]] == [True, False]
    finally:
        compiler.close()


STRUCTURE = {"begin": "<f=sum>", "schema": {"enum": [1, 25]}, "end": "</f>"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "["}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": ""}, "only the empty output"),
        ({"regex": "(" * 10_000}, "invalid regex"),
        ({"json": {"type": "blob"}}, "Invalid type: blob"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "Unsatisfiable"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": '{"not":' * 300 + "{}" + "}" * 300}, "recursion limit"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": "root ::= 'a'"}, "the grammar is no EBNF .llama.cpp's GBNF.: Expected name at line 1"),
        ({"grammar": "a ::= b"}, "the grammar is no EBNF .*: Rule 'b' not found"),
        ({"grammar": r'root ::= "\ud800"'}, "the grammar is no EBNF .*: .* surrogates not allowed"),
        ({"grammar": "root ::= " + "(" * 5000}, "the grammar is no EBNF .*: maximum recursion depth"),
        ({"structural_tag": {"triggers": ["<f"], "structures": [{**STRUCTURE, "schema": {"type": "x"}}]}}, "type: x"),
        ({"regex": "a" * 300_000}, "has 300000 characters; it can have at most 262144"),
    ],
)
def test_what_is_invalid_is_refused(compiler: GrammarCompiler, fields: dict[str, Any], message: str) -> None:
    for _ in range(2):  # the second time from what is remembered
        with pytest.raises(InvalidRequest, match=message):
            compiler.compile(StructuredOutputs(**fields), ignore_eos=False)


@pytest.mark.parametrize("seed", range(3))
def test_masks_of_a_grammar_in_ebnf(compiler: GrammarCompiler, seed: int) -> None:
    grammar = (
        'root ::= greeting " " name ("!" | "?"){1,2}\n# one of two\ngreeting ::= "Hi" | "Ho"\nname ::= [A-C] [a-z]*'
    )
    pattern = regex.compile("H[io] [A-C][a-z]*[!?]{1,2}")
    check_masks(
        compiler.compile(StructuredOutputs(grammar=grammar), ignore_eos=False),
        lambda text: pattern.fullmatch(text, partial=True) is not None,
        lambda text: pattern.fullmatch(text) is not None,
        seed,
    )


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" "::=" "b"',
        '?start: "a" "::=" "b"',
        'start[max_tokens=9]: "a" "::=" "b"',
        'start: a "b"\na: "a::="  // root ::= "c"',
        'root ::= start "b"\nstart ::= "a::="',
        'start0 ::= "a"\n  root ::= start0 start [b] # start: "c"\nstart ::= "::="',
    ],
)
def test_ebnf_is_told_from_lark_by_its_rules(compiler: GrammarCompiler, grammar: str) -> None:
    """In Lark `::=` may be text, and in EBNF a rule may be called `start`."""
    state = compiler.compile(StructuredOutputs(grammar=grammar), ignore_eos=False)
    assert check_masks(state, *finite(["a::=b"]), seed=1) == "a::=b"


@pytest.mark.parametrize(
    ("grammar", "output"),
    [
        (r'root ::= "\u00e9ab" "\U0001F600\xe9"', "éab😀é"),
        (r"root ::= [\u00e0-\u00ff]+", "éà"),
        (r"root ::= [\u0041BC]+", "ABC"),
        (r"root ::= [\u005d\u002d\u005e\]]+", "^]-]"),
        (r'root ::= "\u0022\u005c\u000a" "\\u0041"', '"\\\n\\u0041'),
        (r'root ::= [^"\\\x7F\x00-\x1F] "[a\[\]\t"', "é[a[]\t"),
        ('root ::= "a\tb\n\x7f" [\n] "/" [/]', "a\tb\n\x7f\n//"),
    ],
)
def test_characters_of_ebnf(compiler: GrammarCompiler, grammar: str, output: str) -> None:
    """However llama.cpp writes them."""
    state = compiler.compile(StructuredOutputs(grammar=grammar), ignore_eos=False)
    for token in TOKENIZER(output)["input_ids"]:
        assert state.allowed[token]
        state.accept(token)
    assert state.allowed[EOS]


@pytest.mark.parametrize("seed", range(3))
def test_masks_of_any_object(compiler: GrammarCompiler, seed: int) -> None:
    state = compiler.compile(StructuredOutputs(json_object=True), ignore_eos=False)
    same = compiler.compile(StructuredOutputs(json={"type": "object"}), ignore_eos=False)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        assert np.array_equal(state.allowed, same.allowed)
        token = int(rng.choice(np.flatnonzero(state.allowed)))
        if token == EOS:
            break
        state.accept(token)
        same.accept(token)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("triggers", [["<f="], ["<f=sum>"]])
def test_masks_of_text_with_tags(compiler: GrammarCompiler, triggers: list[str], seed: int) -> None:
    """From a trigger on the tag is all that can follow; before, and after its end, any text that begins no other."""
    tag = {"triggers": triggers, "structures": [STRUCTURE]}
    state = compiler.compile(StructuredOutputs(structural_tag=tag), ignore_eos=False)
    text = "".join(["so ", triggers[0]])
    for token in TOKENIZER(text)["input_ids"]:
        assert state.allowed[token]
        state.accept(token)
    tags = [f"<f=sum>{number}</f>"[len(triggers[0]) :] for number in (1, 25)]
    pieces = token_texts()
    rng = np.random.default_rng(seed)
    written = ""
    while written not in tags:
        allowed = [token for token in np.flatnonzero(state.allowed) if pieces[token] is not None]
        assert allowed
        assert all(any(whole.startswith(written + str(pieces[token])) for whole in tags) for token in allowed)
        token = int(rng.choice(allowed))
        state.accept(token)
        written += str(pieces[token])
    assert state.allowed[EOS]
    assert state.allowed[TOKENIZER("a")["input_ids"][0]]


def test_a_trigger_may_be_a_special_token(compiler: GrammarCompiler) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo" / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    [call] = tokenizer("<call>", add_special_tokens=False)["input_ids"]
    special = GrammarCompiler(tokenizer, PADDED, [EOS])
    structure = {"begin": "<call>", "schema": {"enum": [7]}, "end": ""}
    try:
        wanted = StructuredOutputs(structural_tag={"triggers": ["<call>"], "structures": [structure]})
        state = special.compile(wanted, ignore_eos=False)
        state.accept(call)
        assert [TOKENIZER.decode([token]) for token in np.flatnonzero(state.allowed)] == ["7"]
        mixed = {"triggers": ["<call>", "<f>"], "structures": [structure, {**STRUCTURE, "begin": "<f>"}]}
        with pytest.raises(InvalidRequest, match="'<call>' is a special token and '<f>' is none"):
            special.compile(StructuredOutputs(structural_tag=mixed), ignore_eos=False)
    finally:
        special.close()


def chain(length: int) -> dict[str, Any]:
    """A schema whose references go through so many others; 50,000 end any process that compiles it."""
    definitions: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$defs": {**definitions, f"a{length}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


def test_what_would_end_the_process_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="too much memory, to compile; simplify it"):
        compiler.compile(StructuredOutputs(json=chain(6000)), ignore_eos=False)
    # A new process tries the next one; a chain of a length that schemas do have is fine.
    grammar = compiler.compile(StructuredOutputs(json=chain(50)), ignore_eos=False)
    assert grammar.allowed[TOKENIZER("7")["input_ids"][0]]


def test_what_takes_too_long_is_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compile(StructuredOutputs(regex="warm"), ignore_eos=False)
    monkeypatch.setattr(grammar_compiler, "_SECONDS", 0.5)
    slow = StructuredOutputs(json={"type": "integer", "multipleOf": 1_000_003})
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.5 s"):
        compiler.compile(slow, ignore_eos=False)
    with pytest.raises(InvalidRequest, match="takes more than"):
        compiler.compile(slow, ignore_eos=False)


def test_time_in_which_the_process_does_not_run_does_not_count(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(StructuredOutputs(regex="[cd]+"), ignore_eos=False)
    assert compiler._trial is not None
    pid = compiler._trial._process.pid
    monkeypatch.setattr(grammar_compiler, "_SECONDS", 0.5)
    os.kill(pid, signal.SIGSTOP)
    goes_on = threading.Timer(1.5, os.kill, (pid, signal.SIGCONT))
    goes_on.start()
    compiler.compile(StructuredOutputs(regex="[ab]+"), ignore_eos=False)
    goes_on.join()
    assert compiler._trial._process.pid == pid


@contextlib.contextmanager
def held(compiler: GrammarCompiler, wanted: StructuredOutputs) -> Iterator[tuple[int, Future[Grammar]]]:
    """The process that tries a grammar, stopped in the midst of it, and what comes of the grammar."""
    compiler._start()
    assert compiler._trial is not None
    pid = compiler._trial._process.pid
    os.kill(pid, signal.SIGSTOP)
    begun, try_it = threading.Event(), grammar_compiler._Trial.compile

    def tried(trial: grammar_compiler._Trial, grammar: str) -> tuple[str, str] | None:
        begun.set()
        return try_it(trial, grammar)

    with pytest.MonkeyPatch.context() as noting, ThreadPoolExecutor(1) as threads:
        noting.setattr(grammar_compiler._Trial, "compile", tried)
        compiling = threads.submit(compiler.compile, wanted, ignore_eos=False)
        assert begun.wait(SECONDS)
        yield pid, compiling


def test_closing_in_the_midst_of_a_grammar(compiler: GrammarCompiler) -> None:
    """It waits for no process, whatever keeps that from going on; the thread that compiles goes on at once."""
    wanted = StructuredOutputs(regex="closed+")
    with held(compiler, wanted) as (_, compiling):
        compiler.close()
        with pytest.raises(grammar_compiler.GrammarsUnavailable, match="being closed"):
            compiling.result(SECONDS)
    assert not compiler.is_compiled(wanted, ignore_eos=False)
    compiler.compile(wanted, ignore_eos=False)
    assert compiler.is_compiled(wanted, ignore_eos=False)
    assert not compiler.is_compiled(wanted, ignore_eos=True)


def test_a_process_that_is_ended_from_outside_says_nothing_of_its_grammar(compiler: GrammarCompiler) -> None:
    """The kernel ends some process where memory is short."""
    wanted = StructuredOutputs(regex="ended+")
    with held(compiler, wanted) as (pid, compiling):
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(grammar_compiler.GrammarsUnavailable, match="try again later"):
            compiling.result(SECONDS)
    compiler.compile(wanted, ignore_eos=False)


@pytest.mark.parametrize("comment", ["", "// " + "x" * 2**17], ids=["short", "more than a pipe holds"])
def test_a_process_that_gets_no_processor_says_nothing_of_its_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, comment: str
) -> None:
    wanted = StructuredOutputs(grammar=f'start: "late" {comment}')
    compiler._start()
    with monkeypatch.context() as hasty:
        hasty.setattr(grammar_compiler, "_SECONDS", 0.1)
        hasty.setattr(grammar_compiler, "_MOST_SECONDS", 0.1)
        with (
            held(compiler, wanted) as (_, compiling),
            pytest.raises(grammar_compiler.GrammarsUnavailable, match="try again later"),
        ):
            compiling.result(SECONDS)
    compiler.compile(wanted, ignore_eos=False)


def test_what_is_compiled_waits_for_no_other_grammar(compiler: GrammarCompiler) -> None:
    known, wrong = StructuredOutputs(regex="known+"), StructuredOutputs(regex="[")
    compiler.compile(known, ignore_eos=False)
    with pytest.raises(InvalidRequest, match="unclosed"):
        compiler.compile(wrong, ignore_eos=False)
    with compiler._compiling:
        assert compiler.is_compiled(known, ignore_eos=False)
        assert compiler.is_compiled(wrong, ignore_eos=False)
        compiler.compile(known, ignore_eos=False)


@pytest.mark.parametrize("executable", ["/bin/false", "/there/is/none"])
def test_without_a_process_to_try_them_grammars_are_unavailable_for_now(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    compiler.close()
    wanted = StructuredOutputs(regex=f"({executable})+")
    with monkeypatch.context() as lacking:
        lacking.setattr(sys, "executable", executable)
        with pytest.raises(grammar_compiler.GrammarsUnavailable, match="start") as caught:
            compiler.compile(wanted, ignore_eos=False)
    told = api_error(caught.value)
    assert (told.status, told.headers) == (503, {"Retry-After": "1"})
    compiler.compile(wanted, ignore_eos=False)


def test_known_grammars_do_not_wait_for_slow_ones(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    known = StructuredOutputs(regex="known")
    compiler.compile(known, ignore_eos=False)
    slow = StructuredOutputs(json={"type": "integer", "multipleOf": 999_983})
    tried, go_on = threading.Event(), threading.Event()

    def try_slowly(trial: object, grammar: str) -> None:
        """Of a grammar that turns out to be too much."""
        tried.set()
        assert go_on.wait(SECONDS)

    monkeypatch.setattr(grammar_compiler._Trial, "compile", try_slowly)

    def compile_slow() -> None:
        with pytest.raises(InvalidRequest):
            compiler.compile(slow, ignore_eos=False)

    compiling = Background(compile_slow)
    assert tried.wait(SECONDS)
    compiler.compile(known, ignore_eos=False)
    assert compiling.runs()
    go_on.set()
    compiling.finish()


def test_what_is_kept_is_bounded_by_its_size(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "_KEPT_CHARACTERS", 1000)
    for length in (10, 100, 300, 300, 2000, 10, 300):
        compiler.compile(StructuredOutputs(choice=["x" * length]), ignore_eos=False)
        sizes = [len(text) for text, _ in compiler._compiled]
        assert len(sizes) == 1 or sum(sizes) <= 1000
    assert len(compiler._compiled) == 2


def test_a_limit_that_is_reached_while_a_request_runs_is_an_error(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputs(regex="[ab]*"), ignore_eos=False)
    limits = LLParserLimits(step_max_items=1, step_lexer_fuel=1)
    source = LLMatcher.grammar_from_lark('start: "a" start? | "b" start "c"')
    grammar._matcher = LLMatcher(compiler._start(), source, log_level=0, limits=limits)
    with pytest.raises(GrammarError, match="the output cannot go on under structured_outputs: "):
        grammar.accept(TOKENIZER("a")["input_ids"][0])


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = StructuredOutputs(regex="a")
    with pytest.raises(InvalidRequest, match="needs a tokenizer of the Rust library"):
        GrammarCompiler(None, 96, [0]).compile(wanted, ignore_eos=False)
    with pytest.raises(InvalidRequest, match="needs a tokenizer whose tokens are known as bytes"):
        GrammarCompiler(make_tokenizer(), 96, [0]).compile(wanted, ignore_eos=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r"llguidance, which is not installed: pip install 'vattn\[structured\]'"):
        GrammarCompiler(TOKENIZER, PADDED, [0]).compile(wanted, ignore_eos=False)


def test_the_process_ends_with_its_compiler() -> None:
    compiler = GrammarCompiler(TOKENIZER, PADDED, [EOS])
    compiler.compile(StructuredOutputs(json={"type": "object"}), ignore_eos=False)
    trial = compiler._trial
    assert trial is not None
    assert trial.usable
    process = trial._process
    del compiler, trial
    assert process.poll() is not None
