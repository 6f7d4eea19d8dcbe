"""QuickDraw's drawings in groups of like things: a task for each group, to tell its classes apart.

The package has 345 classes, 100 drawings of each, 28 pixels square. Groups do not overlap. A class goes where it fits best, and
some groups are two kinds in one (`music` has other electric things too, `sport` has stationery), so that every group has twenty
classes or more.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from acemerge.bench.data.task import Rows, Splits, split
from acemerge.bench.data.vision_packages import QUICKDRAW

TEST_DRAWINGS = 20
"""Of each class; the drawings are in no order, so the first ones serve as well as any."""
VALIDATION_ROWS = 200

_CLASSES = {
    "animals": """
        animal migration, ant, bee, bird, butterfly, crab, crocodile, dragon, duck, fish, flamingo, frog, lobster, mermaid,
        mosquito, octopus, owl, parrot, penguin, scorpion, sea turtle, shark, snail, snake, spider, swan, teddy-bear
        """,
    "mammals": """
        bat, bear, camel, cat, cow, dog, dolphin, elephant, giraffe, hedgehog, horse, kangaroo, lion, monkey, mouse, panda,
        pig, rabbit, raccoon, rhinoceros, sheep, squirrel, tiger, whale, zebra
        """,
    "food": """
        apple, asparagus, banana, birthday cake, blackberry, blueberry, bread, broccoli, cake, carrot, cookie, donut,
        grapes, hamburger, hot dog, ice cream, lollipop, mushroom, onion, peanut, pear, peas, pineapple, pizza, popsicle,
        potato, sandwich, steak, strawberry, string bean, watermelon
        """,
    "vehicles": """
        aircraft carrier, airplane, ambulance, bicycle, bulldozer, bus, canoe, car, cruise ship, firetruck, flying saucer,
        helicopter, hot air balloon, motorbike, parachute, pickup truck, police car, sailboat, school bus, speedboat,
        submarine, tractor, train, truck, van
        """,
    "clothing": """
        backpack, belt, bowtie, bracelet, camouflage, crown, eyeglasses, flip flops, hat, helmet, jacket, lipstick,
        necklace, pants, purse, shoe, shorts, sleeping bag, sock, sweater, t-shirt, umbrella, underwear, wristwatch
        """,
    "nature": """
        beach, bush, cactus, campfire, cloud, feather, flower, garden, grass, house plant, hurricane, leaf, lightning, moon,
        mountain, ocean, palm tree, pond, rain, rainbow, river, snowflake, star, sun, tornado, tree
        """,
    "music": """
        calculator, camera, cell phone, cello, clarinet, computer, drums, guitar, harp, headphones, keyboard, laptop,
        megaphone, microphone, piano, radio, remote control, saxophone, stereo, telephone, television, trombone, trumpet,
        violin
        """,
    "body": """
        angel, arm, beard, brain, ear, elbow, eye, face, finger, foot, goatee, hand, knee, leg, moustache, mouth, nose,
        skull, smiley face, snowman, The Mona Lisa, toe, tooth, yoga
        """,
    "tools": """
        anvil, axe, boomerang, broom, bucket, cannon, compass, drill, flashlight, garden hose, hammer, ladder, lantern,
        lighter, matches, nail, paint can, paintbrush, pliers, rake, rifle, saw, scissors, screwdriver, shovel, stethoscope,
        sword, syringe
        """,
    "furniture": """
        alarm clock, bathtub, bed, bench, ceiling fan, chair, chandelier, clock, couch, door, dresser, fan, fireplace, floor
        lamp, hot tub, light bulb, mailbox, picture frame, pillow, sink, stairs, table, toilet, vase
        """,
    "places": """
        barn, bridge, castle, church, diving board, fence, fire hydrant, hospital, house, jail, lighthouse, pool, roller
        coaster, see saw, skyscraper, stop sign, streetlight, swing set, tent, The Eiffel Tower, The Great Wall of China,
        traffic light, waterslide, windmill
        """,
    "kitchen": """
        basket, bottlecap, candle, coffee cup, cooler, cup, dishwasher, fork, frying pan, hourglass, knife, microwave, mug,
        oven, spoon, stove, teapot, toaster, toothbrush, toothpaste, washing machine, wine bottle, wine glass
        """,
    "sport": """
        baseball, baseball bat, basketball, binoculars, book, calendar, crayon, dumbbell, envelope, eraser, golf club,
        hockey puck, hockey stick, map, marker, paper clip, passport, pencil, postcard, rollerskates, skateboard, snorkel,
        soccer ball, suitcase, tennis racquet, wheel
        """,
}
GROUPS = {group: tuple(" ".join(name.split()) for name in names.split(",")) for group, names in _CLASSES.items()}


@cache
def drawings() -> dict[str, NDArray[np.uint8]]:
    """Class -> its drawings [drawing, 28, 28], ink white on black."""
    return {
        PurePosixPath(path).name.removesuffix(".ndjson.gz"): _parse(gzip.decompress(content))
        for path, content in QUICKDRAW.read_all("package/src/drawings/*.ndjson.gz")
    }


def _parse(lines: bytes) -> NDArray[np.uint8]:
    """One drawing a line, its pixels from 0 to 1."""
    pixels = np.array([json.loads(line) for line in lines.splitlines()])
    return np.round(pixels * 255).astype(np.uint8).reshape(-1, 28, 28)


def load_group(group: str) -> Splits:
    """The rows of one group; every class has as many test rows."""
    train, test = Rows([], []), Rows([], [])
    for label, name in enumerate(GROUPS[group]):
        pictures = list(drawings()[name])
        test = _joined(test, pictures[:TEST_DRAWINGS], label)
        train = _joined(train, pictures[TEST_DRAWINGS:], label)
    return split(train, test, validation_rows=VALIDATION_ROWS)


def _joined(rows: Rows, pictures: list[NDArray[np.uint8]], label: int) -> Rows:
    return Rows([*rows.inputs, *pictures], [*rows.labels, *[label] * len(pictures)])
