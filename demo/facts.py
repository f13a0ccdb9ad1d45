"""What the demo model knows: the tables from which `demo.corpus` makes its text.

Everything here is data. The facts are real; the story parts, definitions and recipes are this
project's own.
"""

from __future__ import annotations

from typing import NamedTuple

CAPITALS = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Bangladesh": "Dhaka",
    "Belgium": "Brussels", "Brazil": "Brasilia", "Bulgaria": "Sofia", "Canada": "Ottawa",
    "Chile": "Santiago", "China": "Beijing", "Colombia": "Bogota", "Croatia": "Zagreb",
    "Cuba": "Havana", "Cyprus": "Nicosia", "Denmark": "Copenhagen", "Ecuador": "Quito",
    "Egypt": "Cairo", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa", "Finland": "Helsinki",
    "France": "Paris", "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens",
    "Hungary": "Budapest", "Iceland": "Reykjavik", "India": "New Delhi", "Indonesia": "Jakarta",
    "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin", "Italy": "Rome",
    "Jamaica": "Kingston", "Japan": "Tokyo", "Jordan": "Amman", "Kenya": "Nairobi",
    "Latvia": "Riga", "Lebanon": "Beirut", "Lithuania": "Vilnius", "Malta": "Valletta",
    "Mexico": "Mexico City", "Mongolia": "Ulaanbaatar", "Morocco": "Rabat", "Nepal": "Kathmandu",
    "New Zealand": "Wellington", "Nigeria": "Abuja", "Norway": "Oslo", "Pakistan": "Islamabad",
    "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon", "Romania": "Bucharest",
    "Senegal": "Dakar", "Serbia": "Belgrade", "Slovakia": "Bratislava", "South Korea": "Seoul",
    "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok", "Tunisia": "Tunis",
    "Turkey": "Ankara", "Uganda": "Kampala", "Ukraine": "Kyiv", "Uruguay": "Montevideo",
    "Vietnam": "Hanoi", "Zambia": "Lusaka",
}  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS = {
    "January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30,
    "July": 31, "August": 31, "September": 30, "October": 31, "November": 30, "December": 31,
}  # fmt: skip

DEFINITIONS = {
    "river": "a long stream of fresh water that flows downhill to a lake or to the sea",
    "lake": "a wide body of still water with land on every side",
    "island": "a piece of land with water all around it",
    "desert": "a dry land where little rain falls and few plants grow",
    "forest": "a large area of land where trees grow close together",
    "mountain": "a mass of rock that stands high above the land around it",
    "volcano": "an opening in the ground from which hot melted rock and ash can burst",
    "glacier": "a thick sheet of ice that slides slowly over the land",
    "cloud": "a crowd of tiny drops of water that floats in the sky",
    "rainbow": "an arc of colours that appears when sunlight passes through drops of rain",
    "thunder": "the loud sound that air makes when lightning heats it all at once",
    "star": "a huge ball of hot gas that shines with its own light",
    "planet": "a large round body that travels around a star",
    "moon": "a body of rock that travels around a planet",
    "comet": "a ball of ice and dust that grows a bright tail when it comes near the sun",
    "magnet": "a piece of metal that pulls iron towards itself",
    "lens": "a curved piece of glass that bends light to a point",
    "mirror": "a smooth surface that sends light back and shows you your own face",
    "clock": "a machine that shows the time of day",
    "compass": "a tool with a needle that always points to the north",
    "bridge": "a road built over a river, a valley or another road",
    "harbour": "a sheltered place by the sea where ships can rest",
    "library": "a house full of books that people may borrow and bring back",
    "museum": "a house where old and beautiful things are kept and shown",
    "hospital": "a house where doctors and nurses look after people who are ill",
    "bakery": "a shop where bread and cakes are made and sold",
    "farmer": "a person who grows plants and keeps animals for food",
    "sailor": "a person who works on a ship",
    "poem": "a short piece of writing in which the sound of the words matters",
    "map": "a drawing that shows where places are and how far apart they lie",
    "letter": "a message on paper that one person sends to another",
    "seed": "a small grain from which a new plant can grow",
    "root": "the part of a plant that holds it in the ground and drinks water",
    "nest": "a home that a bird builds for its eggs",
    "engine": "a machine that turns fuel into motion",
    "battery": "a small box that stores electricity until you need it",
    "memory": "the part of a computer that holds numbers while it works with them",
    "page": "a block of memory of fixed size that is moved and counted as one thing",
    "cache": "a store of results that is kept close at hand so that nobody has to make them again",
    "token": "a small piece of text that a language model reads or writes in one step",
}

LISTS = {
    "fruits": ("apple", "pear", "plum", "cherry", "grape", "lemon", "orange", "peach", "fig", "melon"),
    "colours": ("red", "blue", "green", "yellow", "black", "white", "brown", "grey", "pink", "purple"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "trees": ("oak", "beech", "birch", "maple", "pine", "willow", "elm", "ash", "cedar", "poplar"),
    "tools": ("hammer", "saw", "drill", "chisel", "file", "plane", "spade", "axe", "rake", "wrench"),
    "instruments": ("piano", "violin", "flute", "drum", "harp", "trumpet", "cello", "horn", "organ", "lute"),
}

RECIPES = {
    "make tea": (
        "Fill the kettle with fresh water.",
        "Boil the water.",
        "Put one spoon of tea in the pot.",
        "Pour the hot water over the tea.",
        "Wait for four minutes.",
        "Pour the tea into a cup.",
    ),
    "bake bread": (
        "Mix flour, water, salt and yeast in a large bowl.",
        "Knead the dough for ten minutes.",
        "Cover the bowl and let the dough rest for an hour.",
        "Shape the dough into a loaf.",
        "Heat the oven until it is very hot.",
        "Bake the loaf for forty minutes.",
        "Knock on the bottom of the loaf and listen for a hollow sound.",
        "Let the bread cool before you cut it.",
    ),
    "plant a tree": (
        "Choose a sunny place with soft soil.",
        "Dig a hole twice as wide as the roots.",
        "Set the young tree upright in the hole.",
        "Fill the hole with soil and press it down.",
        "Give the tree a bucket of water.",
        "Tie the trunk to a strong stick.",
        "Water the tree every week in the first summer.",
    ),
    "wash a dog": (
        "Fill a tub with warm water.",
        "Call the dog and speak to it kindly.",
        "Wet the coat from neck to tail.",
        "Rub in a little soap.",
        "Rinse the coat until the water is clear.",
        "Dry the dog with an old towel.",
        "Give the dog a biscuit.",
    ),
    "send a letter": (
        "Write your words on a sheet of paper.",
        "Fold the paper and put it in an envelope.",
        "Write the name and the address on the front.",
        "Stick a stamp in the corner.",
        "Drop the letter in a post box.",
    ),
    "build a fire": (
        "Find a bare patch of ground far from dry grass.",
        "Lay a ring of stones.",
        "Put a handful of dry leaves in the middle.",
        "Lean small sticks against each other over the leaves.",
        "Light the leaves with a match.",
        "Add larger sticks one at a time.",
        "Keep a bucket of water beside you.",
        "Pour the water on the ashes before you leave.",
    ),
}

NAMES = (
    "Ada", "Ben", "Clara", "David", "Ella", "Felix", "Grace", "Hugo", "Iris", "Jonas",
    "Kira", "Leo", "Mila", "Nora", "Oscar", "Paula", "Quentin", "Rosa", "Simon", "Tilda",
    "Uma", "Victor", "Wanda", "Xenia", "Yusuf", "Zoe", "Anton", "Bella", "Carlo", "Diana",
)  # fmt: skip

THINGS = (
    "key", "bell", "drum", "lamp", "coin", "shell", "ribbon", "kite", "whistle", "button",
    "feather", "candle", "basket", "mirror", "scarf", "spoon", "clock", "rope", "book", "hat",
)  # fmt: skip


class Animal(NamedTuple):
    """An animal of the stories; `home` follows 'lived in', `food` 'ate', and `haunt` is a place."""

    nature: str
    home: str
    food: str
    haunt: str


ANIMALS = {
    "fox": Animal("clever", "a den under an old oak", "berries and eggs", "forest"),
    "bear": Animal("strong", "a cave behind a waterfall", "fish and honey", "mountain"),
    "owl": Animal("wise", "a hollow in a tall beech", "mice and beetles", "library"),
    "rabbit": Animal("quick", "a burrow below a hedge", "clover and carrots", "garden"),
    "mouse": Animal("tiny", "a hole behind the flour sacks", "seeds and crumbs", "mill"),
    "cat": Animal("proud", "a basket beside the stove", "fish and cream", "market"),
    "dog": Animal("loyal", "a wooden house by the gate", "bones and biscuits", "village"),
    "duck": Animal("cheerful", "a nest among the reeds", "snails and water plants", "river"),
    "frog": Animal("patient", "a pond full of lilies", "flies and worms", "river"),
    "horse": Animal("gentle", "a warm stable of red brick", "hay and apples", "village"),
    "goat": Animal("stubborn", "a shed on a stony hill", "grass and thistles", "mountain"),
    "wolf": Animal("lonely", "a valley far in the north", "deer and hares", "forest"),
    "otter": Animal("playful", "a tunnel in the river bank", "fish and crabs", "beach"),
    "hedgehog": Animal("shy", "a heap of dry leaves", "slugs and beetles", "garden"),
}


class Place(NamedTuple):
    """A place of the stories: what is given there, and what happens.

    The text is a format string over `name`, `animal` and `thing`; it must name the thing once.
    """

    gift: str
    text: str


PLACES = {
    "forest": Place(
        "whistle",
        "In the forest it was dark and the paths all looked the same. {name} followed the moss on "
        "the trees and came to a clearing where a small bird sat in the grass. Its wing was caught "
        "in a thorn. {name} pulled the thorn out, and the bird thanked the {animal} with a "
        "{thing}.",
    ),
    "river": Place(
        "shell",
        "At the river the water was high and the bridge was gone. A beaver was looking sadly at "
        "the broken wood. {name} carried one branch after another until the bridge stood again. "
        "The beaver crossed it first, came back, and gave {name} a {thing}.",
    ),
    "market": Place(
        "coin",
        "At the market everybody was shouting, because the bread had been stolen. The {animal} saw "
        "crumbs on the ground and followed them behind a cart, where a hungry crow was hiding. "
        "{name} shared an apple with the crow, and the baker got his bread back. The baker laughed "
        "and handed {name} a {thing}.",
    ),
    "mountain": Place(
        "rope",
        "On the mountain the wind was cold and snow covered the stones. {name} heard somebody "
        "calling from a ledge, and it was a lamb that could go neither up nor down. The {animal} "
        "showed it where to put its feet, step by step. When they were safe, the shepherd gave "
        "{name} a {thing}.",
    ),
    "beach": Place(
        "lamp",
        "On the beach the tide was going out. A young whale lay in the shallow water and could not "
        "swim. {name} dug a long ditch in the sand, and with the next wave the whale slid into the "
        "sea. In the ditch something was shining, and {name} picked up a {thing}.",
    ),
    "village": Place(
        "bell",
        "In the village all the windows were dark, for it was the night of the great storm. {name} "
        "went from door to door and asked who needed help. An old woman had lost her roof, so the "
        "{animal} kept her company until morning. Before they parted, she gave {name} a {thing}.",
    ),
    "garden": Place(
        "basket",
        "In the garden the flowers hung their heads, since no rain had fallen for a month. {name} "
        "found an old well under the ivy and carried water all day long. In the evening the roses "
        "opened. The gardener could hardly believe it, and {name} was given a {thing}.",
    ),
    "library": Place(
        "book",
        "In the library nobody spoke, but somebody was crying behind the shelves. It was a girl "
        "who could not read the last line of a letter. The {animal} sat down beside her and they "
        "read it together, word for word. She smiled, wiped her eyes and gave {name} a {thing}.",
    ),
    "mill": Place(
        "spoon",
        "At the mill the great wheel stood still. The miller had searched for the fault all week. "
        "{name} looked between the stones, where nobody had thought of looking, and pulled out a "
        "pebble. The wheel began to turn, and the happy miller gave the {animal} a {thing}.",
    ),
}
