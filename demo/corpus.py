"""Makes the text that the demo model learns: questions and answers of very different lengths.

An answer is a function of its question, never a choice: a model that has learned the text can be
right to the letter under greedy decoding, stories included, and so can be measured.
Everything is drawn from one `random.Random`, so a seed names a corpus.
"""

from __future__ import annotations

import string
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from demo.facts import (
    ANIMALS,
    CAPITALS,
    DAYS,
    DEFINITIONS,
    LISTS,
    MONTHS,
    NAMES,
    PLACES,
    RECIPES,
    THINGS,
)

SYSTEM_SENTENCES = (
    "You are a helpful assistant.",
    "You are a small language model.",
    "You answer questions about numbers, words and places.",
    "Answer briefly and clearly.",
    "Answer in plain English.",
    "Be kind and patient.",
    "Do not guess when you can count.",
    "Write complete sentences.",
    "Stop when the answer is complete.",
    "Stories may be long, but they must come to an end.",
    "Read the question twice before you answer.",
    "The reader may be a child.",
)

END = "<|end|>"  # the tokenizer's eos token: every answer ends with it

WORDS = sorted({*THINGS, *DEFINITIONS, *ANIMALS})

Made = tuple[str, str]  # question, answer


@dataclass(frozen=True)
class Kind:
    """One kind of question.

    `weight` is its share of the questions, relative to the others. A kind is `open` when it has
    too many questions to learn by heart: one in twenty of its answers is then held out of training.
    """

    weight: int
    open: bool
    make: Callable[[Random], Made]


@dataclass(frozen=True)
class Conversation:
    """One training document: an instruction or none, then questions with their answers."""

    system: str
    turns: tuple[Made, ...]


def prompt(question: str, system: str = "", history: Sequence[Made] = ()) -> str:
    """The text that the model continues. It does not end in a space, since the answer begins with one.

    `history` holds earlier questions and answers, oldest first.
    """
    before = "".join(f"Question: {q}\nAnswer: {a}{END}\n" for q, a in history)
    return (f"{system}\n" if system else "") + f"{before}Question: {question}\nAnswer:"


def sums(rng: Random) -> Made:
    """The units come first, as on paper: the carry is then written down before it is needed."""
    a, b = (rng.randrange(10 ** rng.choice((1, 2, 2))) for _ in range(2))
    asked = rng.choice((f"What is {a} + {b}?", f"What is {a} plus {b}?", f"Add {a} and {b}."))
    units = f"{a % 10} + {b % 10} = {a % 10 + b % 10}, so " if max(a, b) > 9 else ""
    return asked, f"{units}{a} + {b} = {a + b}."


def differences(rng: Random) -> Made:
    b, a = sorted(rng.randrange(10 ** rng.choice((1, 2, 2))) for _ in range(2))
    asked = rng.choice((f"What is {a} - {b}?", f"What is {a} minus {b}?"))
    lent = a % 10 + (10 if a % 10 < b % 10 else 0)
    units = f"{lent} - {b % 10} = {lent - b % 10}, so " if a > 9 else ""
    return asked, f"{units}{a} - {b} = {a - b}."


def products(rng: Random) -> Made:
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    return rng.choice((f"What is {a} x {b}?", f"What is {a} times {b}?")), f"{a} x {b} = {a * b}."


def tables(rng: Random) -> Made:
    n = rng.randint(1, 20)
    asked = rng.choice((f"Write the {n} times table.", f"What is the {n} times table?"))
    return asked, ", ".join(f"{n} x {i} = {n * i}" for i in range(1, 13)) + "."


def counts(rng: Random) -> Made:
    """Numbers from 1 to 100, up or down by ones, or up by twos, fives or tens."""
    step = rng.choice((1, 1, 1, -1, 2, 5, 10))
    size = abs(step)
    length = rng.randint(2, rng.choice((10, 100 // size)))
    first = rng.randint(1, 100 - size * (length - 1))
    numbers = range(first, first + size * length, size)[:: step // size]
    span = f"from {numbers[0]} to {numbers[-1]}"
    asked = {1: f"Count {span}.", -1: f"Count down {span}."}.get(step, f"Count by {step} {span}.")
    return asked, ", ".join(map(str, numbers)) + "."


def capitals(rng: Random) -> Made:
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.3:
        return f"Which country has the capital {city}?", f"{city} is the capital of {country}."
    asked = (f"What is the capital of {country}?", f"Name the capital of {country}.")
    return rng.choice(asked), f"The capital of {country} is {city}."


def letters(rng: Random) -> Made:
    abc = string.ascii_uppercase
    i, j = sorted(rng.sample(range(26), 2))
    return rng.choice(
        (
            ("Say the alphabet.", ", ".join(abc) + "."),
            ("Say the alphabet backwards.", ", ".join(reversed(abc)) + "."),
            (f"Say the letters from {abc[i]} to {abc[j]}.", ", ".join(abc[i : j + 1]) + "."),
            (f"Which letter comes after {abc[i]}?", f"{abc[i + 1]} comes after {abc[i]}."),
            (f"Which letter comes before {abc[j]}?", f"{abc[j - 1]} comes before {abc[j]}."),
        )
    )


def calendar(rng: Random) -> Made:
    i, j = rng.randrange(7), rng.randrange(12)
    day, month, months = DAYS[i], list(MONTHS)[j], list(MONTHS)
    return rng.choice(
        (
            ("List the days of the week.", f"{', '.join(DAYS)}."),
            ("List the months of the year.", f"{', '.join(MONTHS)}."),
            (f"Which day comes after {day}?", f"{DAYS[(i + 1) % 7]} comes after {day}."),
            (f"Which day comes before {day}?", f"{DAYS[i - 1]} comes before {day}."),
            (f"Which month comes after {month}?", f"{months[(j + 1) % 12]} comes after {month}."),
            (f"How many days are in {month}?", f"{month} has {MONTHS[month]} days."),
        )
    )


def definitions(rng: Random) -> Made:
    word, meaning = rng.choice(list(DEFINITIONS.items()))
    asked = rng.choice((f"What is {_a(word)}?", f"Explain what {_a(word)} is."))
    return asked, f"{_a(word).capitalize()} is {meaning}."


def animals(rng: Random) -> Made:
    word, animal = rng.choice(list(ANIMALS.items()))
    return rng.choice(
        (
            (f"What does {_a(word)} eat?", f"{_a(word).capitalize()} eats {animal.food}."),
            (f"Where does {_a(word)} live?", f"{_a(word).capitalize()} lives in {animal.home}."),
        )
    )


def lists(rng: Random) -> Made:
    of, words = rng.choice(list(LISTS.items()))
    n = rng.randint(2, len(words))
    return rng.choice((f"Name {n} {of}.", f"List {n} {of}.")), ", ".join(words[:n]) + "."


def recipes(rng: Random) -> Made:
    task, steps = rng.choice(list(RECIPES.items()))
    asked = rng.choice((f"How do you {task}?", f"Tell me how to {task}."))
    return asked, " ".join(f"{i}. {step}" for i, step in enumerate(steps, 1))


def repeats(rng: Random) -> Made:
    """Numbered, because a model this small loses count of bare repetitions."""
    word, n = (
        rng.choice((*THINGS, "hello", "goodbye", "thanks")),
        rng.randint(2, rng.choice((10, 50))),
    )
    return f"Say {word} {n} times.", ", ".join(f"{i} {word}" for i in range(1, n + 1)) + "."


def echoes(rng: Random) -> Made:
    words = ", ".join(rng.sample(WORDS, rng.randint(2, 8)))
    return f"Repeat this list: {words}.", f"{words}."


def reversals(rng: Random) -> Made:
    words = rng.sample(WORDS, rng.randint(3, 6))
    return f"Reverse this list: {', '.join(words)}.", ", ".join(reversed(words)) + "."


def stories(rng: Random) -> Made:
    """A story with 0 to 5 places in it: about 60 to 450 tokens."""
    name, animal = rng.choice(NAMES), rng.choice(list(ANIMALS))
    about = f"about {_a(animal)} named {name}"
    tour = _tour(ANIMALS[animal].haunt)
    asked, places = rng.choice(
        (
            (f"Write a short story {about}.", tour[:0]),
            (f"Write a story {about}.", tour[:1]),
            (f"Write a long story {about}.", tour[:5]),
            *[_visit(about, rng.sample(list(PLACES), rng.randint(1, 5))) for _ in range(3)],
        )
    )
    return asked, tell(name, animal, {place: PLACES[place].gift for place in places})


def readings(rng: Random) -> Made:
    """A question about a story that stands in the prompt: a long prompt with a short answer."""
    name, animal, gifts = _heard(rng)
    place, thing = rng.choice(list(gifts.items()))
    asked, answer = rng.choice(
        (
            ("Who is the story about?", f"The story is about {_a(animal)} named {name}."),
            (
                f"What did {name} bring from the {place}?",
                f"{name} brought a {thing} from the {place}.",
            ),
            (f"Where did the {thing} come from?", f"The {thing} came from the {place}."),
        )
    )
    return f"Read this story. {tell(name, animal, gifts)} {asked}", answer


def summaries(rng: Random) -> Made:
    name, animal, gifts = _heard(rng)
    answer = (
        f"{name} the {animal} visited {_join([f'the {place}' for place in gifts])} "
        f"and came home with {_join([f'a {thing}' for thing in gifts.values()])}."
    )
    return f"Summarise this story. {tell(name, animal, gifts)}", answer


KINDS = {
    "sum": Kind(24, True, sums),
    "difference": Kind(16, True, differences),
    "product": Kind(4, False, products),
    "table": Kind(2, False, tables),
    "count": Kind(14, True, counts),
    "capital": Kind(6, False, capitals),
    "letters": Kind(7, False, letters),
    "calendar": Kind(4, False, calendar),
    "definition": Kind(5, False, definitions),
    "animal": Kind(3, False, animals),
    "list": Kind(3, False, lists),
    "recipe": Kind(2, False, recipes),
    "repeat": Kind(5, True, repeats),
    "echo": Kind(5, True, echoes),
    "reverse": Kind(8, True, reversals),
    "story": Kind(6, True, stories),
    "reading": Kind(4, True, readings),
    "summary": Kind(2, True, summaries),
}


def tell(name: str, animal: str, gifts: dict[str, str]) -> str:
    """A story in which `name` visits the places in `gifts`, and is given a thing at each."""
    hero = ANIMALS[animal]
    opening = (
        f"Once there was {_a(hero.nature)} {animal} named {name} who lived in {hero.home}. "
        f"{name} ate {hero.food} and liked to watch the clouds."
    )
    visits = [PLACES[place].text.format(name=name, animal=animal, thing=thing) for place, thing in gifts.items()]
    ending = f"One day {name} slept until noon, and nothing happened at all. The end."
    if gifts:
        things = _join([f"a {thing}" for thing in gifts.values()])
        ending = f"In the evening {name} was home again with {things}, tired and happy. The end."
    return " ".join([opening, *visits, ending])


def held_out(kind: str, answer: str) -> bool:
    """Whether training never shows this answer. It is the answer that counts, not the wording of
    its question, or 'What is 1 + 2?' would be learned from 'Add 1 and 2.'."""
    return KINDS[kind].open and zlib.crc32(answer.encode()) % 20 == 0


def exam(kind: str, count: int, seed: int) -> list[Made]:
    """Up to `count` different questions to examine a model with, held out ones of an open kind."""
    rng, pairs = Random(f"{seed} exam {kind}"), dict[str, str]()
    for _ in range(10_000):
        question, answer = KINDS[kind].make(rng)
        if held_out(kind, answer) or not KINDS[kind].open:
            pairs[question] = answer
        if len(pairs) == count:
            break
    return list(pairs.items())


def conversations(seed: int) -> Iterator[Conversation]:
    """Training documents, without end. Most are one question without an instruction."""
    rng = Random(f"{seed} train")
    while True:
        system = ""
        if rng.random() < 0.1:
            system = " ".join(rng.sample(SYSTEM_SENTENCES, rng.randint(1, 6)))
        turns = rng.choices((1, 2, 3), (85, 10, 5))[0]
        yield Conversation(system, tuple(_train_pair(rng) for _ in range(turns)))


def _train_pair(rng: Random) -> Made:
    kinds = list(KINDS)
    while True:
        kind = rng.choices(kinds, [KINDS[k].weight for k in kinds])[0]
        question, answer = KINDS[kind].make(rng)
        if not held_out(kind, answer):
            return question, answer


def _heard(rng: Random) -> tuple[str, str, dict[str, str]]:
    """What a story in a prompt is about. The gifts are drawn, so its questions need reading."""
    places = rng.sample(list(PLACES), rng.randint(1, rng.choice((2, 4))))
    gifts = dict(zip(places, rng.sample(THINGS, len(places)), strict=True))
    return rng.choice(NAMES), rng.choice(list(ANIMALS)), gifts


def _tour(first: str) -> list[str]:
    """All places in their usual order, beginning with `first`."""
    places = list(PLACES)
    start = places.index(first)
    return places[start:] + places[:start]


def _visit(about: str, places: list[str]) -> tuple[str, list[str]]:
    visited = _join([f"the {place}" for place in places])
    return f"Write a story {about} who visits {visited}.", places


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _join(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
