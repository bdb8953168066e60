"""Procedurally drawn cartoon characters: the example concept `ZIBBO` and others unlike it.

Input: a character, a pose and an image size. Output: an RGB image, a pure function of them. Few,
big, flat parts, so that a character is still itself at 64x64 pixels. Coordinates are the body's
own: its centre is the origin, an egg is 2 high, y points down, left and right are the image's.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw
from scenes import COLOURS, RGB, SUPERSAMPLING, Point

# Half width, half height, power (1 a rhombus, 2 round, 6 a block), taper (> 0: the top is narrow).
BODIES: dict[str, tuple[float, float, float, float]] = {
    "egg": (0.84, 1.0, 2.2, 0.13), "ball": (1.0, 0.95, 2.0, 0.0), "block": (0.82, 0.9, 6.0, 0.0),
    "pear": (0.9, 1.0, 2.1, 0.42), "turnip": (0.88, 0.95, 2.1, -0.34),
    "loaf": (1.05, 0.66, 3.0, 0.1), "tower": (0.56, 1.0, 4.0, 0.0), "gem": (1.0, 1.05, 1.25, 0.0),
}  # fmt: skip
HEADS = {
    "antennae": "two antennae", "ears": "two round ears", "horns": "two horns",
    "spikes": "three spikes", "leaf": "a leaf on top", "bald": "a bald head",
}  # fmt: skip
# Where the hands are, left and right: outwards from the body's side, and down from its centre.
ARMS: dict[str, tuple[Point, Point]] = {
    "at rest": ((0.12, 0.6), (0.12, 0.6)),
    "waving": ((0.12, 0.6), (0.28, -0.62)),
    "arms up": ((0.28, -0.62), (0.28, -0.62)),
    "arms out": ((0.36, 0.02), (0.36, 0.02)),
    "pointing left": ((0.4, 0.0), (0.12, 0.6)),
}
MOUTHS = ("smiling", "laughing", "surprised", "sad")
BLACK, WHITE, CREAM, ORANGE = (26, 24, 34), (252, 252, 250), (255, 236, 196), (255, 128, 20)


@dataclass(frozen=True, kw_only=True)
class Character:
    """What stays the same in every image of one character; `colour` is the body colour's name."""

    colour: str
    body: RGB
    belly: RGB
    tips: RGB
    feet: RGB
    shape: str
    head: str
    eyes: int

    @property
    def words(self) -> str:
        """The character in a caption: "a teal creature with two antennae"."""
        article = "an" if self.colour == "orange" else "a"
        return f"{article} {self.colour} creature with {HEADS[self.head]}"


@dataclass(frozen=True, kw_only=True)
class Pose:
    """What differs between images: where the body's centre is, how tall it is, what it does.

    `position` is in fractions of the image, `scale` an egg's height in fractions of the image's
    (of less in a narrow one), `tilt` in degrees clockwise, `gaze` from -1 to 1, right and down > 0.
    """

    position: Point = (0.5, 0.57)
    scale: float = 0.6
    tilt: float = 0.0
    gaze: Point = (0.0, 0.0)
    mouth: str = "smiling"
    arms: str = "at rest"

    @property
    def words(self) -> str:
        """The pose in a caption, the one or two most telling things: "waving, looking up"."""
        x, y = self.gaze
        sideways = f"looking {'left' if x < 0 else 'right'}" if abs(x) > 0.6 else ""
        upwards = f"looking {'up' if y < 0 else 'down'}" if abs(y) > 0.6 else ""
        arms = self.arms if self.arms != "at rest" else ""
        return ", ".join([words for words in (arms, sideways or upwards, self.mouth) if words][:2])


ZIBBO = Character(
    colour="teal", body=(4, 166, 168), belly=CREAM, tips=ORANGE, feet=ORANGE,
    shape="egg", head="antennae", eyes=2,
)  # fmt: skip


def other_character(index: int) -> Character:
    """Character `index`: never an egg, never teal or cyan; the first 420 are all different."""
    names = [name for name in COLOURS if name not in {"cyan", "black"}]
    shapes = [shape for shape in BODIES if shape != "egg"]
    heads = list(HEADS)
    rng = random.Random(f"character/{index}")
    code = index * 149 % (len(names) * len(shapes) * len(heads))
    colour = names[code % len(names)]
    bright = [name for name in COLOURS if name not in {colour, "black", "brown", "gray"}]
    belly = rng.choice([CREAM, COLOURS[colour], COLOURS[rng.choice(bright)]])
    tips, feet = COLOURS[rng.choice(bright)], COLOURS[rng.choice(bright)]
    shape, head = shapes[code // len(names) % len(shapes)], heads[code // len(names) // len(shapes)]
    return Character(
        colour=colour, body=COLOURS[colour], belly=belly, tips=tips, feet=feet,
        shape=shape, head=head, eyes=rng.choice((1, 2, 2, 2, 3)),
    )  # fmt: skip


def random_pose(rng: random.Random) -> Pose:
    """Draw a pose in which the character is about in the middle and fills most of the image."""
    ways = ((0.0, 0.0), (0.0, 0.0), (-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0))
    return Pose(
        position=(rng.uniform(0.46, 0.54), rng.uniform(0.565, 0.58)),
        scale=rng.uniform(0.55, 0.62), tilt=rng.gauss(0, 6), gaze=rng.choice(ways),
        mouth=rng.choice(MOUTHS), arms=rng.choice(list(ARMS)),
    )  # fmt: skip


def draw(
    character: Character, pose: Pose, *, width_px: int, height_px: int, background: RGB
) -> Image.Image:
    """Draw the character on a plain background; a narrow image shrinks it so that it fits."""
    size_px = (width_px * SUPERSAMPLING, height_px * SUPERSAMPLING)
    image = Image.new("RGB", size_px, background)
    pen = _Pen(image, pose)
    _head(pen, character)
    width, height, power, taper = BODIES[character.shape]
    for side, (out, down) in zip((-1, 1), ARMS[pose.arms], strict=True):
        hand = (side * (width + out), down * height)
        pen.limb([(side * width * 0.7, 0.2 * height), hand], 0.2, character.body)
        pen.disc(hand, 0.16, 0.16, character.body)
        pen.disc((side * 0.46 * width, height), 0.34 * width + 0.05, 0.19, character.feet)
    pen.shape(_oval((0, 0), width, height, power, taper), character.body)
    pen.disc((0, 0.54 * height), 0.6 * width, 0.36 * height, character.belly)
    _face(pen, character, pose)
    return image.reduce(SUPERSAMPLING)


class _Pen:
    """Draws flat parts given in the body's coordinates."""

    def __init__(self, image: Image.Image, pose: Pose) -> None:
        self.draw = ImageDraw.Draw(image)
        self.centre = (pose.position[0] * image.width, pose.position[1] * image.height)
        self.unit_px = pose.scale / 2 * min(image.height, 1.05 * image.width)
        self.tilt = math.radians(pose.tilt)

    def at(self, point: Point) -> Point:
        cos, sin = math.cos(self.tilt) * self.unit_px, math.sin(self.tilt) * self.unit_px
        x, y = point
        return self.centre[0] + x * cos - y * sin, self.centre[1] + x * sin + y * cos

    def limb(self, points: list[Point], width: float, colour: RGB) -> None:
        corners = [self.at(point) for point in points]
        width_px = round(width * self.unit_px)
        self.draw.line(corners, fill=colour, width=width_px, joint="curve")
        for x, y in (corners[0], corners[-1]):
            r = width_px / 2
            self.draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)

    def shape(self, points: list[Point], colour: RGB) -> None:
        self.draw.polygon([self.at(point) for point in points], fill=colour)

    def disc(self, at: Point, rx: float, ry: float, colour: RGB) -> None:
        self.shape(_oval(at, rx, ry), colour)


def _head(pen: _Pen, character: Character) -> None:
    width, height, _, _ = BODIES[character.shape]
    top, tips = -height, character.tips
    if character.head == "leaf":
        pen.limb([(0, top + 0.2), (0, top - 0.2)], 0.1, character.body)
        pen.shape([(0, top - 0.15), (0.25, top - 0.5), (0.75, top - 0.5), (0.5, top - 0.15)], tips)
    if character.head == "spikes":
        for x, rise, root in ((-0.4, 0.3, 0.3), (0.4, 0.3, 0.3), (0.0, 0.5, 0.1)):
            base = top + root
            pen.shape([(x - 0.24, base), (1.2 * x, top - rise), (x + 0.24, base)], tips)
    for side in (-1, 1):
        if character.head == "antennae":
            tip = (side * 0.46, top - 0.42)
            pen.limb([(side * 0.2, top + 0.2), (side * 0.3, top - 0.1), tip], 0.13, character.body)
            pen.disc(tip, 0.18, 0.18, tips)
        elif character.head == "ears":
            ear = (side * 0.62 * width, top + 0.1)
            pen.disc(ear, 0.34, 0.34, character.body)
            pen.disc(ear, 0.19, 0.19, tips)
        elif character.head == "horns":
            x, base = side * 0.5 * width, top + 0.4
            pen.shape([(x - 0.24, base), (x + side * 0.26, top - 0.42), (x + 0.24, base)], tips)


def _face(pen: _Pen, character: Character, pose: Pose) -> None:
    width, height, _, _ = BODIES[character.shape]
    r = min(0.36, 0.45 * width)
    eyes = {1: (1.25, 0.0), 2: (1.0, -r, r), 3: (0.82, -1.6 * r, 1.6 * r, 0.0)}
    factor, *places = eyes[character.eyes]
    r *= factor
    for x in places:
        pen.disc((x, -0.36 * height), r, r, WHITE)
        x, y = x + 0.4 * r * pose.gaze[0], -0.36 * height + 0.4 * r * pose.gaze[1]
        pen.disc((x, y), 0.52 * r, 0.52 * r, BLACK)
        pen.disc((x - 0.16 * r, y - 0.2 * r), 0.15 * r, 0.15 * r, WHITE)
    y, wide = 0.24 * height, 0.34 * min(1.0, width + 0.1)
    arc = [(wide * math.cos(a), 0.2 * math.sin(a)) for a in (k / 12 * math.pi for k in range(13))]
    if pose.mouth == "laughing":
        pen.shape([(px, y - 0.12 + 1.5 * py) for px, py in arc], COLOURS["red"])
    elif pose.mouth == "surprised":
        pen.disc((0, y), 0.13, 0.15, COLOURS["red"])
    else:
        bend = 1 if pose.mouth == "smiling" else -1
        pen.limb([(px, y + bend * (py - 0.1)) for px, py in arc], 0.1, BLACK)


def _oval(at: Point, rx: float, ry: float, power: float = 2.0, taper: float = 0.0) -> list[Point]:
    points = []
    for angle in (k / 48 * math.pi for k in range(96)):
        across, down = math.cos(angle), math.sin(angle)
        x = math.copysign(abs(across) ** (2 / power), across)
        y = math.copysign(abs(down) ** (2 / power), down)
        points.append((at[0] + rx * x * (1 + taper * y), at[1] + ry * y))
    return points
