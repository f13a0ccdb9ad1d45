"""Text that grows token by token: the same as decoding at once, whole characters only, stop strings held back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.support.effort import effort
from tests.support.small_tokenizers import byte_fallback, byte_level
from vattn.engine import SamplingParams
from vattn.engine.requests.detokenizer import Detokenizer
from vattn.engine.requests.text import TokenText

TEXTS = [
    "Hello, world .  Two  spaces, a tab\tand a line\n\nend ",
    "naïve café — 中文字符 混在 english, 👩‍👩‍👧‍👦 and 🇩🇪!",
    "한국어 텍스트와 עברית and \N{REPLACEMENT CHARACTER} itself",
    " leading space",
    "  two leading spaces",
]


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {"byte-level": byte_level, "byte-fallback": byte_fallback}


@pytest.fixture(params=MAKERS, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return MAKERS[request.param]()


def decoder(tokenizer: PreTrainedTokenizerFast, skip: bool = True) -> Callable[[list[int]], str]:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def test_a_text_goes_on_where_those_before_it_ended(tokenizer: PreTrainedTokenizerFast) -> None:
    """With the space before its first word, which a tokenizer leaves out at the beginning of a text."""
    reader = TokenText(tokenizer)
    for text in (*TEXTS[:3], "ሰላምሰላም a"):  # letters of three bytes each
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for cut in range(1, len(ids)):
            before = reader.of(ids[:cut], skip_special_tokens=True)
            if before.endswith("\N{REPLACEMENT CHARACTER}"):
                continue
            detokenizer = reader.detokenizer(SamplingParams(), ids[:cut])
            assert detokenizer is not None
            for token in ids[cut:]:
                detokenizer.push(token)
            assert before + detokenizer.text() == reader.of(ids, skip_special_tokens=True)


def test_single_tokens_have_the_space_that_they_stand_for() -> None:
    text = TokenText(byte_fallback())
    ids = byte_fallback()("Hello a b", add_special_tokens=False)["input_ids"]
    assert "".join(text.of_token(token) or "" for token in ids) == " Hello a b"
    assert b"".join(map(text.bytes_of, ids)) == b" Hello a b"
    assert text.of_token(int(byte_fallback().convert_tokens_to_ids("▁▁"))) == "  "


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_the_pieces_are_the_text(tokenizer: PreTrainedTokenizerFast, text: str, skip: bool) -> None:
    decode = decoder(tokenizer, skip)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    eos = tokenizer.eos_token_id
    halves = [tokenizer(half, add_special_tokens=False)["input_ids"] for half in (text[:6], text[6:])]
    for tokens in (ids, [eos, *halves[0], eos, eos, *halves[1], eos], [eos] * 30 + ids):
        detokenizer = Detokenizer(decode)
        pieces = []
        for token in tokens:
            assert detokenizer.push(token) is None
            pieces.append(detokenizer.take())
        detokenizer.finish()
        last = detokenizer.take()
        whole = decode(tokens)
        assert "".join(pieces) + last == whole
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
            assert last == ""
        assert sum(map(bool, pieces)) > len(text) / 8, "it streams"


def test_random_tokens_that_are_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """Characters of one to four bytes in any order, cut into tokens."""
    rng = random.Random(0)
    decode = decoder(tokenizer)
    for _ in range(60):
        text = "".join(rng.choice("ab ,é中한👍 \n") for _ in range(40))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids[: rng.randrange(1, len(ids))] if tokenizer.decode(ids[:1]) != "" else ids
        detokenizer = Detokenizer(decode)
        for token in ids:
            detokenizer.push(token)
        shown = detokenizer.text()
        detokenizer.finish()
        # The last character may lack its last bytes.
        whole = decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")
        assert text.strip().startswith(whole.strip())
        assert whole.startswith(shown)
        assert detokenizer.text() == whole


def test_bytes_that_are_no_text_do_not_wait_for_ever() -> None:
    tokenizer = byte_level()
    decode = decoder(tokenizer)
    detokenizer = Detokenizer(decode)
    bad = tokenizer.convert_tokens_to_ids("ÿ")  # the byte 0xFF
    tokens = [bad] * 100
    for token in tokens:
        detokenizer.push(token)
    assert len(detokenizer.text()) > 80
    text = detokenizer.text()
    detokenizer.finish()
    assert detokenizer.text() == text, "bytes that may begin a character are not text"


def test_decoding_sees_a_few_tokens_at_a_time(tokenizer: PreTrainedTokenizerFast) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decoder(tokenizer)(ids)

    detokenizer = Detokenizer(decode)
    for token in tokenizer(TEXTS[1] * 5 + "hello a " * 50, add_special_tokens=False)["input_ids"]:
        detokenizer.push(token)
    assert longest <= 24


STOPS: list[tuple[list[str], str, str, str | None]] = [
    (["END"], "helEND more", "hel", "END"),
    (["END"], "heEEND", "heE", "END"),
    (["END"], "heEN", "heEN", None),
    (["aab"], "aaab", "a", "aab"),
    (["xyz", "yz"], "axyz", "a", "xyz"),
    (["bcd", "c"], "abcd", "ab", "c"),
    (["yz", "xyz"], "axyz", "ax", "yz"),
    (["中文"], "a 中文", "a ", "中文"),
    (["\n\n"], "one\n\ntwo", "one", "\n\n"),
    (["nowhere"], "some text", "some text", None),
]


@pytest.mark.parametrize(("stops", "text", "want", "found"), STOPS)
def test_stop_strings_across_tokens(stops: list[str], text: str, want: str, found: str | None) -> None:
    tokenizer = byte_level()
    for include in (False, True):
        detokenizer = Detokenizer(decoder(tokenizer), stops, include_stop=include)
        shown, stopped = "", None
        for token in tokenizer(text)["input_ids"]:
            stopped = detokenizer.push(token)
            shown += detokenizer.take()
            assert (want + (found or "")).startswith(shown)
            if stopped is not None:
                break
        detokenizer.finish()
        assert stopped == found
        assert shown + detokenizer.take() == want + (found or "" if include else "")


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(decoder(tokenizer), ["xyz"])
    seen = []
    for token in tokenizer("axbxyy")["input_ids"]:
        detokenizer.push(token)
        seen.append(detokenizer.text())
    assert seen == ["a", "a", "axb", "axb", "axb", "axbxyy"]


def test_a_stop_string_that_comes_too_early_is_text() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(decoder(tokenizer), ["ab"])
    ids = tokenizer("xabyab")["input_ids"]
    assert [detokenizer.push(token, may_stop=i >= 3) for i, token in enumerate(ids)] == [None] * 5 + ["ab"]
    detokenizer.finish()
    assert detokenizer.text() == "xaby"


def test_a_stop_string_that_was_complete_too_early_never_counts() -> None:
    """Not even where its text waits, as it may be the beginning of another stop string."""
    pieces = {1: " there", 2: " was", 3: " x", 4: " the"}
    for stops in ([" the"], [" the", " there was a"]):
        detokenizer = Detokenizer(lambda ids: "".join(pieces[i] for i in ids), stops)
        assert [detokenizer.push(token, may_stop=token > 1) for token in (1, 2, 3)] == [None] * 3
        assert detokenizer.push(4) == " the"
        assert detokenizer.text() == " there was x"


def test_a_stop_string_that_is_completed_in_time_counts() -> None:
    """It may begin before that."""
    pieces = {1: "a", 2: "a", 3: "b"}
    detokenizer = Detokenizer(lambda ids: "".join(pieces[i] for i in ids), ["aa", "aab"])
    assert detokenizer.push(1, may_stop=False) is None
    assert detokenizer.push(2, may_stop=False) is None
    assert detokenizer.push(3) == "aab"


def _begun(text: str, stop: str) -> int:
    """How much of a stop string a text ends with, but not the whole."""
    return max(count for count in range(min(len(stop), len(text) + 1)) if text.endswith(stop[:count]))


@settings(max_examples=effort(400, 20_000), deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=6), max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=5),
    too_early=st.integers(0, 20),
    include=st.booleans(),
)
def test_stop_strings_as_in_the_whole_text(pieces: list[str], stops: list[str], too_early: int, include: bool) -> None:
    detokenizer = Detokenizer(lambda ids: "".join(pieces[i] for i in ids), stops, include_stop=include)
    text = ""
    for token, piece in enumerate(pieces):
        known, text = len(text), text + piece
        places = [(text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in stops]
        ends = [(start + len(stop), start, stop) for start, stop in places if start >= 0]
        found = min(ends, key=itemgetter(0), default=None)
        stopped = detokenizer.push(token, may_stop=token >= too_early)
        if token >= too_early and found is not None:
            end, start, stop = found
            assert stopped == stop
            assert detokenizer.text() == text[: end if include else start]
            return
        assert stopped is None
        assert detokenizer.text() == text[: len(text) - max(_begun(text, stop) for stop in stops)]
    detokenizer.finish()
    assert detokenizer.text() == text


class _Counted(str):
    """A stop string that counts how often the text is compared with its beginnings."""

    compared = 0

    def __getitem__(self, place: Any) -> str:
        self.compared += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("text", ["a" * 4000, "ab" * 2000, ("a" * 1023 + "b") * 4], ids=["a", "ab", "nearly"])
@pytest.mark.parametrize("other", ["b" * 1024, "a" * 1024 + "y", "ab" * 511 + "y"], ids=["b", "a", "ab"])
def test_stop_strings_are_compared_no_more_often_than_there_is_text(text: str, other: str) -> None:
    """However much is held back, for one stop string or for another."""
    stops = [_Counted("a" * 1023 + "z"), _Counted(other)]
    size, num_tokens = 4, len(text) // 4
    detokenizer = Detokenizer(lambda ids: "".join(text[size * i : size * (i + 1)] for i in ids), stops)
    assert all(detokenizer.push(token) is None for token in range(num_tokens))
    assert all(stop.compared <= len(text) + num_tokens for stop in stops)


def _bytes_of(chunks: list[bytes]) -> Callable[[list[int]], str]:
    return lambda tokens: b"".join(chunks[token] for token in tokens).decode(errors="replace")


def _read(chunks: list[bytes]) -> str:
    reader = Detokenizer(_bytes_of(chunks))
    pieces = []
    for token in range(len(chunks)):
        reader.push(token)
        pieces.append(reader.take())
    reader.finish()
    return "".join(pieces) + reader.take()


@pytest.mark.parametrize(
    "chunks",
    [
        [b"\xc3", *[b"\xa9\xc3"] * 40, b"\xa9!"],
        *([*[b"\x80"] * stray, *(bytes([byte]) for byte in "中é😀!".encode())] for stray in range(12)),
        [*[b"\xff"] * 7, b"\xc3", b"\xa9", *[b"\xff"] * 30, b"!"],
        [*[b"\xe4\xb8"] * 20, b"\xad", b"!"],
        [bytes([byte]) for byte in b"\xf0\x9f" + "\ufffd😀".encode()],
        [bytes([byte]) for byte in "\ufffd\ufffd😀!".encode()],
        [
            b"\xc3",
            *[b"\xa9\xc3"] * 6,
            b"\xa9\xf0",
            *(bytes([byte]) for byte in b"\x9f\x98\xf0\x9f\x98\xf0\x9f\x98\x80"),
        ],
        *([*[b"\x80"] * stray, *[b""] * 7, b"\xc3", b"\xa9", b"!"] for stray in range(4)),
        [b"\xf0", *[b""] * 7, b"\x9f", *[b""] * 7, b"\x98", *[b""] * 20, b"\x80!"],
    ],
)
def test_characters_among_bytes_that_are_none(chunks: list[bytes]) -> None:
    """Each token may end in a character that the next one completes; tokens without a text are between some."""
    assert _read(chunks) == b"".join(chunks).decode(errors="replace")


_PARTS: list[str | bytes] = ["é", "中", "😀", "a", b"\x80", b"\xff", b"\xe4", b"\xf0\x9f", "\ufffd"]


@settings(max_examples=effort(300, 20_000), deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["é", "中", "😀", "a", b"\x80", b"\xff", b"\xe4", b"\xf0\x9f", "\ufffd"]), max_size=60
    ),
    sizes=st.lists(st.integers(0, 4), min_size=1).filter(any),
)
def test_bytes_cut_anywhere(text: list[str | bytes], sizes: list[int]) -> None:
    whole = b"".join(part if isinstance(part, bytes) else part.encode() for part in text)
    chunks, place = [], 0
    for size in itertools.cycle(sizes):
        if place >= len(whole):
            break
        chunks.append(whole[place : place + size])
        place += size
    mark = "\N{REPLACEMENT CHARACTER}"
    assert _read(chunks).rstrip(mark) == whole.decode(errors="replace").rstrip(mark)


def test_tokens_without_a_text_after_an_unfinished_character() -> None:
    """They are not kept, however many there are."""
    chunks = [b"a", b"\xc3", *[b""] * 100, b"b"]
    reader = Detokenizer(_bytes_of(chunks))
    for token in range(len(chunks)):
        reader.push(token)
        assert len(reader._window) <= 20
    assert reader.text() == "a\N{REPLACEMENT CHARACTER}b"
