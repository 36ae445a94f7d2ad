"""Plain prompts of many kinds for a chat model, those to train on and those held out apart.

    python scripts/plain_prompts.py -n 6000 > prompts.jsonl
    python scripts/plain_prompts.py --held-out > held_out.jsonl

Every prompt is a way to ask about a subject. The 64 that are held out are about 32 subjects that no other prompt has,
each in one of the others' ways and in one that is held out too.
"""

from __future__ import annotations

import argparse
import json
import random

_SUBJECTS = """
apples ants autumn ballet bamboo banks bats beaches bears beetles bicycles boats bones books bread breakfast bricks
brothers butter cakes camels candles canoes caves chairs cheese chess cities clay climbing clouds coal coffee coins
colours comets compasses cooking copper corn cotton cows crickets dancing deserts dictionaries dinner dogs dolphins
doors dreams drums ducks dust eagles ears earthquakes eggs elections elephants engines envelopes exams farms fear
feathers fences fire fish flags flour flutes fog football forests fossils friendship frogs fruit furniture games
gardens geese ghosts giraffes gloves gold grandparents grapes grass gravity guitars hair hammers hands happiness
harbours hats hedgehogs history holidays honey horses hospitals hotels houses hunger ice insects iron islands jazz
jokes juice kitchens kites knives knots ladders lakes lamps languages laughter laws leaves lemons letters libraries
light lions luck magnets maps markets marriage meadows medicine memory metals mice milk mirrors money monkeys
mountains museums mushrooms music nails names needles neighbours newspapers night noise numbers oceans oil olives
onions opera oranges owls paint paper parks parrots patience pencils penguins pepper phones photographs pianos
pigeons pilots planets plants poems police pottery prisons rabbits radios rainbows recipes rice riddles roads robots
roses rubber salt sand schools science scissors sheep ships shoes silence silk silver sisters sleep smoke snails
snakes snow soap soldiers songs soup space spiders spoons sports spring stamps stars statues steam stones stories
storms students sugar summer sunsets swans swimming tables taxis teachers teeth telescopes tents theatre thunder
tigers time tomatoes tools tourists towers toys trees trust tunnels turtles umbrellas uncles universities valleys
vegetables villages violins volcanoes walls water weddings weather whales wheat wheels wind windows wine winter
wolves wood wool
"""
WAYS = (
    *(
        "Tell me about {}.",
        "What should everybody know about {}?",
        "Explain {} to a child of six.",
        "Why do people like {}?",
    ),
    *("Give me three facts about {}.", "List five words that have to do with {}.", "What is the history of {}?"),
    *("Write the beginning of a story about {}.", "Write a short poem about {}.", "Write a haiku about {}."),
    *("Write a letter to a friend about {}.", "Write a news headline about {}.", "Make up a joke about {}."),
    *("Ask me a question about {}.", "What could go wrong with {}?", "How would you describe {} to somebody blind?"),
    *("Give an example sentence that has the word {} in it.", "What is the opposite of {}, if there is any?"),
    *(
        "Give me advice about {}.",
        "Is it true that {} are overrated? Answer in one sentence.",
        "Where can one find {}?",
    ),
    *("Plan a lesson about {}.", "Name a film or a book that is about {}.", "Write a dialogue of two people about {}."),
    *("Summarise in two sentences what is known about {}.", "What do {} and the moon have in common?"),
    *("Write a Python function that counts how often the word {} is in a text.", "Compare {} and stones."),
    *("I am writing an essay about {}. How should I begin?", "What will {} be like in a hundred years?"),
)
_HELD_OUT_SUBJECTS = """
bridges foxes rain tea trains clocks glass rivers bees shadows buttons deer pumpkins carpets echoes lighthouses
marbles orchards puzzles saddles thieves wells zebras anchors blankets curtains daisies ferries goats hurricanes ink
jewels
"""
HELD_OUT_WAYS = (
    *("What do you think of {}?", "Describe a day on which everything is about {}.", "Write an advertisement for {}."),
    *("What is the best thing about {}?", "Give a speech in praise of {}.", "What are {} good for?"),
    *("Write a diary entry about {}.", "How are {} and numbers alike?"),
)

SUBJECTS, HELD_OUT_SUBJECTS = _SUBJECTS.split(), _HELD_OUT_SUBJECTS.split()


def training(count: int, seed: int = 0) -> list[str]:
    """Different prompts to train on, in random order. Raises ValueError where there are not so many."""
    every = [way.format(subject) for subject in SUBJECTS for way in WAYS]
    if count > len(every):
        raise ValueError(f"there are {len(every)} prompts, got count {count}; ask for fewer.")
    return random.Random(seed).sample(every, count)


def held_out() -> list[str]:
    """64 prompts on subjects that `training` never has, every other one in a way that it never has either."""
    seen = [WAYS[number % len(WAYS)].format(subject) for number, subject in enumerate(HELD_OUT_SUBJECTS)]
    new = [HELD_OUT_WAYS[number % len(HELD_OUT_WAYS)].format(one) for number, one in enumerate(HELD_OUT_SUBJECTS)]
    return [prompt for pair in zip(seen, new, strict=True) for prompt in pair]


def main() -> None:
    """Prints one conversation a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    most = len(SUBJECTS) * len(WAYS)
    parser.add_argument("-n", type=int, default=most, help=f"prompts to train on ({most}, the most that there are)")
    parser.add_argument("--held-out", action="store_true", help="those to measure on instead")
    args = parser.parse_args()
    if not 0 < args.n <= most:
        parser.error(f"-n must be from 1 to {most}, got {args.n}.")
    for prompt in held_out() if args.held_out else training(args.n):
        print(json.dumps({"messages": [{"role": "user", "content": prompt}]}))


if __name__ == "__main__":
    main()
