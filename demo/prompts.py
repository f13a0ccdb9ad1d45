"""A queue of questions as a server would get them: short and long ones in no particular order.

Prompts have from about 10 to 290 tokens, answers from about 6 to 350, and neighbours differ widely:
a batch that waits for its longest answer wastes most of its room on this queue.
"""

from __future__ import annotations

from demo.corpus import prompt, tell

_FOX = tell("Clara", "fox", {"river": "key", "mill": "drum", "garden": "kite", "beach": "hat"})
_OTTER = tell("Hugo", "otter", {"market": "rope", "village": "candle"})
_GOAT = tell("Uma", "goat", {"mountain": "lamp", "library": "clock", "forest": "scarf"})

_QUESTIONS = (
    "What is 7 + 5?",
    "Write a long story about a bear named Hugo.",
    "What is the capital of Norway?",
    "Count from 3 to 60.",
    f"Read this story. {_FOX} Where did the drum come from?",
    "Which letter comes after P?",
    "Write the 12 times table.",
    "What is a glacier?",
    "What is 64 - 27?",
    "Write a story about an owl named Nora who visits the mill, the beach and the village.",
    "Say hello 9 times.",
    f"Summarise this story. {_GOAT}",
    "How do you bake bread?",
    "How many days are in April?",
    "Count from 2 to 99.",
    "Reverse this list: cat, river, bell, moon.",
    f"Read this story. {_OTTER} Who is the story about?",
    "Write a short story about a frog named Ella.",
    "What is 9 times 8?",
    "Say the alphabet.",
    "Write a story about a wolf named Ada.",
    "What does a horse eat?",
    "Name 4 planets.",
    "Write a long story about a duck named Simon.",
)


def prompts() -> list[str]:
    """24 texts, ready for the tokenizer: `model.generate` continues each with its answer and eos."""
    return [prompt(question) for question in _QUESTIONS]


def story_prompt() -> str:
    """A short prompt with a long answer."""
    return prompt("Write a long story about a bear named Hugo.")


def questions_about_the_story() -> list[str]:
    """Eight continuations of one prompt: a story, and then a question about it."""
    gifts = {"river": "key", "mill": "drum", "garden": "kite", "beach": "hat"}
    questions = [
        *(f"What did Clara bring from the {place}?" for place in gifts),
        *(f"Where did the {thing} come from?" for thing in gifts.values()),
    ]
    return [prompt(f"Read this story. {_FOX} {question}") for question in questions]
