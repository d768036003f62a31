"""Write the demonstration prompts: `python tests/pipelines/data/demonstration_prompts.py`.

Short everyday tasks in three domains (chat, mathematics, code), written for this project and put together from
templates, so that a small target can learn their shape within minutes. The output is a pure function of `SEED`;
`test_conversations.py` compares it with the files. Each prompt lands in exactly one split.
"""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "pipelines" / "data" / "demonstration"
SEED = 20261129
SPLITS = {"train": 128, "calibration": 16, "evaluation": 16}  # prompts a domain

NAMES = [
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Irene",
    "Jack",
    "Karen",
    "Leo",
    "Maria",
    "Nina",
    "Oscar",
    "Paula",
]
GIFTS = ["the flowers", "the book", "the dinner", "the tickets", "the photos", "the kind letter", "the warm scarf"]
TIPS = [
    "sleeping better", "saving money", "learning a new language", "staying healthy", "writing a good essay",
    "growing tomatoes", "making new friends", "preparing for an exam", "baking bread", "keeping a house clean",
    "training a puppy", "taking good photos", "speaking in public", "riding a bicycle safely", "reading more books",
    "managing stress", "cooking pasta", "planning a trip", "working from home", "painting a room",
]  # fmt: skip
PLACES = ["Africa", "Australia", "Europe", "the desert", "the ocean", "the forest", "the Arctic", "the mountains"]
COUNTRIES = [
    "France", "Spain", "Italy", "Germany", "Japan", "China", "India", "Egypt", "Canada", "Mexico", "Brazil", "Peru",
    "Norway", "Sweden", "Finland", "Denmark", "Poland", "Greece", "Turkey", "Kenya", "Portugal", "Austria", "Ireland",
]  # fmt: skip
TOPICS = [
    "trees", "rivers", "music", "football", "bread", "bees", "the moon", "bicycles", "libraries", "tea", "winter",
    "computers", "horses", "rain", "bridges", "chess", "dolphins", "volcanoes", "museums", "gardens",
]  # fmt: skip
THINGS = ["apples", "chairs", "books", "tiles", "cookies", "stamps", "bottles", "flowers"]
CLASSES = {
    "Car": ["brand", "year", "color", "price"],
    "Book": ["title", "author", "pages", "year"],
    "Person": ["name", "age", "city", "email"],
    "Animal": ["name", "species", "weight", "color"],
    "Movie": ["title", "director", "year", "rating"],
    "House": ["address", "rooms", "price", "color"],
    "Student": ["name", "grade", "school", "age"],
    "Phone": ["brand", "model", "price", "color"],
}
FUNCTIONS = [
    ("add", "adds two numbers"), ("subtract", "subtracts two numbers"), ("multiply", "multiplies two numbers"),
    ("divide", "divides two numbers"), ("is_even", "checks whether a number is even"),
    ("is_odd", "checks whether a number is odd"), ("square", "returns the square of a number"),
    ("cube", "returns the cube of a number"), ("maximum", "returns the larger of two numbers"),
    ("minimum", "returns the smaller of two numbers"), ("average", "returns the average of a list of numbers"),
    ("total", "returns the sum of a list of numbers"), ("reverse", "reverses a string"),
    ("count_words", "counts the words in a sentence"), ("count_vowels", "counts the vowels in a string"),
    ("is_palindrome", "checks whether a string is a palindrome"), ("factorial", "returns the factorial of a number"),
    ("area_of_rectangle", "returns the area of a rectangle"), ("area_of_circle", "returns the area of a circle"),
    ("celsius_to_fahrenheit", "converts Celsius to Fahrenheit"), ("to_upper", "converts a string to upper case"),
    ("is_positive", "checks whether a number is positive"), ("last_item", "returns the last item of a list"),
    ("remove_spaces", "removes the spaces from a string"),
]  # fmt: skip


def chat_prompts() -> Iterator[str]:
    for topic, count in itertools.product(TIPS, ("three", "four", "five")):
        yield f"Give me {count} tips for {topic}."
    for name, gift in itertools.product(NAMES, GIFTS):
        yield f"Write a short thank-you note to {name} for {gift}."
    for place, count in itertools.product(PLACES, ("three", "four")):
        yield f"Name {count} animals that live in {place}."
    for country in COUNTRIES:
        yield f"What is the capital of {country}?"
    for topic, count in itertools.product(TOPICS, ("three", "five")):
        yield f"List {count} facts about {topic}."


def mathematics_prompts() -> Iterator[str]:
    for a, b in itertools.product(range(12, 98, 7), range(11, 95, 9)):
        yield f"What is {a} + {b}?"
        yield f"What is {a} x {b}?"
    for factor, addend, root in itertools.product((2, 3, 4, 5, 6), (1, 4, 5, 7, 9), (2, 3, 5, 8)):
        yield f"Solve for x: {factor}x + {addend} = {factor * root + addend}. Show your steps."
    for rows, columns, thing in itertools.product((4, 7, 12, 15), (5, 8, 9), THINGS):
        yield f"A box has {rows} rows of {columns} {thing}. How many {thing} are there in all?"
    for base in range(3, 30):
        yield f"List the first ten multiples of {base}."


def code_prompts() -> Iterator[str]:
    for function, purpose in FUNCTIONS:
        yield f"Write a Python function named {function} that {purpose}."
        yield f"Write a Python function that {purpose}."
        yield f"Write a JavaScript function named {function} that {purpose}."
    for name, attributes in CLASSES.items():
        for first, second in itertools.permutations(attributes, 2):
            yield f"Write a Python class named {name} with the attributes {first} and {second}."
            yield f"Write a JavaScript class named {name} with the attributes {first} and {second}."
        for first, second, third in itertools.combinations(attributes, 3):
            yield f"Write a JSON object for a {name.lower()} with {first}, {second} and {third}."


DOMAINS = {"chat": chat_prompts, "mathematics": mathematics_prompts, "code": code_prompts}


def make_prompts() -> dict[str, list[dict[str, object]]]:
    """The rows of every split, domains in turn: `{"id", "domain", "conversations": [{"role", "content"}]}`."""
    drawn = {
        domain: random.Random(f"{SEED}/{domain}").sample(list(prompts()), sum(SPLITS.values()))
        for domain, prompts in DOMAINS.items()
    }
    return {
        split: [
            {
                "id": f"{domain}-{split}-{number:03d}",
                "domain": domain,
                "conversations": [{"role": "user", "content": drawn[domain].pop()}],
            }
            for number in range(count)
            for domain in DOMAINS
        ]
        for split, count in SPLITS.items()
    }


def text_of(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    for split, rows in make_prompts().items():
        path = FOLDER / f"{split}.jsonl"
        path.write_text(text_of(rows), encoding="utf-8")
        print(f"{path.name}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
