"""Procedurally drawn, captioned scenes: the whole training set of the embedded base model.

Input: a seed and an index. Output: an RGB image and its caption, a pure function of both, so that a
training step needs no data on disk and a resumed training sees the same scenes. Two kinds: `scene`
(objects of named shape and colour on a named background, for the denoiser) and `clutter` (many small
parts without a caption, for the autoencoder: variety is what lets it draw things it never saw).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 44),
    "orange": (244, 138, 30),
    "yellow": (250, 222, 66),
    "green": (52, 158, 72),
    "cyan": (72, 204, 214),
    "blue": (44, 82, 202),
    "purple": (126, 58, 168),
    "pink": (246, 150, 192),
    "brown": (120, 76, 42),
    "white": (246, 246, 244),
    "black": (24, 24, 28),
    "gray": (132, 134, 138),
}
SHAPES = (
    "circle", "square", "triangle", "star", "ring", "cross", "diamond", "heart", "egg", "crescent",
    "flower", "house", "tree", "mushroom", "fish",
)  # fmt: skip
SIZES = {"small": (0.16, 0.22), "": (0.23, 0.30), "large": (0.31, 0.38)}
NAMELESS = (
    "miro", "tavo", "bel", "kunn", "oshi", "drell", "puma", "vix", "lomar", "jeddy", "zek", "quill",
)  # fmt: skip
SUPERSAMPLING = 4

RGB = tuple[int, int, int]
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """An image of `width_px` x `height_px`, its caption, and what was drawn (None in clutter).

    `extra` is what the object wears: "face", "white dots", or nothing.
    """

    image: Image.Image
    caption: str
    object_colour: str | None = None
    background_colour: str | None = None
    extra: str | None = None


def scene(seed: int, index: int, width_px: int = 64, height_px: int = 64) -> Scene:
    """Draw captioned scene `index`: one object (70 %) or two, some with a face or a pattern."""
    rng = random.Random(f"scene/{seed}/{index}")
    background = rng.choice(list(COLOURS))
    canvas = _Canvas(width_px, height_px, _jitter(rng, COLOURS[background]))
    first, second, *_ = rng.sample([name for name in COLOURS if name != background], 2)
    alone = rng.random() < 0.7
    caption = _single(rng, canvas, first)[0] if alone else _pair(rng, canvas, first, second)
    article = "an" if background == "orange" else "a"
    caption = f"{caption} on {article} {background} background"
    if rng.random() < 0.1:  # words without a meaning, so that an unknown word does no harm
        caption = f"{rng.choice(NAMELESS)}, {caption}"
    return Scene(
        image=canvas.finish(), caption=caption, object_colour=first, background_colour=background
    )


def scene_of(
    key: str, colour: str, background: str, width_px: int, height_px: int, *, plain: bool = False
) -> Scene:
    """Draw one object of these colours; with the same `key` shape, size and place are the same. `plain`: no extra."""
    rng = random.Random(key)
    canvas = _Canvas(width_px, height_px, _jitter(rng, COLOURS[background]))
    words, extra = _single(rng, canvas, colour, plain=plain)
    return Scene(
        image=canvas.finish(),
        caption=f"{words} on {'an' if background == 'orange' else 'a'} {background} background",
        object_colour=colour,
        background_colour=background,
        extra=extra,
    )


def clutter(seed: int, index: int, width_px: int = 64, height_px: int = 64) -> Scene:
    """Draw uncaptioned scene `index` of many parts: shapes, lines, arcs, dots, some of them stacked."""
    rng = random.Random(f"clutter/{seed}/{index}")
    canvas = _Canvas(width_px, height_px, _any_colour(rng))
    if rng.random() < 0.3:
        canvas.gradient(_any_colour(rng), vertical=rng.random() < 0.7)
    for _ in range(rng.randint(1, 4)):
        at = (rng.uniform(0.1, 0.9), rng.uniform(0.1, 0.9))
        canvas.shape(
            rng.choice(SHAPES),
            at,
            rng.uniform(0.08, 0.45),
            _any_colour(rng),
            rng.uniform(-math.pi, math.pi),
        )
        if rng.random() < 0.4:
            canvas.face(at, rng.uniform(0.1, 0.35), rng)
    for _ in range(rng.randint(2, 14)):
        _small_part(rng, canvas)
    return Scene(image=canvas.finish(), caption="")


def _single(
    rng: random.Random, canvas: _Canvas, colour: str, *, plain: bool = False
) -> tuple[str, str | None]:
    """Draw one object; return the words for it, and its extra, which `plain` leaves out."""
    size, shape = rng.choice(list(SIZES)), rng.choice(SHAPES)
    radius = rng.uniform(*SIZES[size])
    at = (rng.uniform(0.42, 0.58), rng.uniform(0.42, 0.58))
    canvas.shape(shape, at, radius, _jitter(rng, COLOURS[colour]), rng.gauss(0, 0.12))
    extra = None
    can_wear = shape in {"circle", "square", "egg", "heart", "diamond", "star"}
    if can_wear and size != "small" and not plain:
        kind = rng.random()
        if kind < 0.22:
            canvas.face(at, radius * 0.8, rng)
            extra = "face"
        elif kind < 0.32:
            canvas.dots(at, radius * 0.6, rng, _jitter(rng, COLOURS["white"]))
            extra = "white dots"
    worn = {None: "", "face": " with a face", "white dots": " with white dots"}[extra]
    words = f"a {size} {colour} {shape}{worn}".replace("a  ", "a ").replace("a orange", "an orange")
    return words, extra


def _pair(rng: random.Random, canvas: _Canvas, first: str, second: str) -> str:
    names = rng.choice(SHAPES), rng.choice(SHAPES)
    places = ((0.29, 0.5), (0.71, 0.5)) if rng.random() < 0.7 else ((0.5, 0.28), (0.5, 0.72))
    for name, colour, (x, y) in zip(names, (first, second), places, strict=True):
        at = (x + rng.uniform(-0.03, 0.03), y + rng.uniform(-0.06, 0.06))
        canvas.shape(
            name, at, rng.uniform(0.14, 0.19), _jitter(rng, COLOURS[colour]), rng.gauss(0, 0.12)
        )
    relation = "left of" if places[0][1] == 0.5 else "above"
    words = f"a {first} {names[0]} {relation} a {second} {names[1]}"
    return words.replace("a orange", "an orange")


def _small_part(rng: random.Random, canvas: _Canvas) -> None:
    at = (rng.uniform(0.02, 0.98), rng.uniform(0.02, 0.98))
    radius, colour = rng.uniform(0.02, 0.11), _any_colour(rng)
    kind = rng.randrange(5)
    if kind == 0:
        canvas.shape("circle", at, radius * 0.7, colour, 0.0)
    elif kind == 1:
        canvas.shape(rng.choice(SHAPES), at, radius * 1.3, colour, rng.uniform(-math.pi, math.pi))
    elif kind == 2:
        end = (at[0] + rng.uniform(-0.4, 0.4), at[1] + rng.uniform(-0.4, 0.4))
        canvas.line((at, end), rng.uniform(0.012, 0.05), colour)
    elif kind == 3:
        canvas.arc(
            at,
            radius * 1.6,
            rng.uniform(0, 360),
            rng.uniform(60, 250),
            rng.uniform(0.012, 0.04),
            colour,
        )
    else:  # an eye: a white disc with a dark one in it
        canvas.shape("circle", at, radius * 0.9, COLOURS["white"], 0.0)
        inner = (at[0] + rng.uniform(-0.3, 0.3) * radius, at[1] + rng.uniform(-0.3, 0.3) * radius)
        canvas.shape("circle", inner, radius * 0.45, COLOURS["black"], 0.0)


def _jitter(rng: random.Random, colour: RGB, spread: int = 9) -> RGB:
    red, green, blue = (
        max(0, min(255, channel + rng.randint(-spread, spread))) for channel in colour
    )
    return red, green, blue


def _any_colour(rng: random.Random) -> RGB:
    if rng.random() < 0.5:
        return _jitter(rng, rng.choice(list(COLOURS.values())), 24)
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


class _Canvas:
    """A drawing surface in unit coordinates of the shorter side, antialiased by supersampling."""

    def __init__(self, width_px: int, height_px: int, colour: RGB) -> None:
        self.size_px = (width_px, height_px)
        self.large_px = (width_px * SUPERSAMPLING, height_px * SUPERSAMPLING)
        self.unit_px = min(self.large_px)
        self.image = Image.new("RGB", self.large_px, colour)
        self.draw = ImageDraw.Draw(self.image)

    def at(self, point: Point) -> Point:
        return point[0] * self.large_px[0], point[1] * self.large_px[1]

    def gradient(self, colour: RGB, *, vertical: bool) -> None:
        ramp = Image.linear_gradient("L").resize(self.large_px)
        ramp = ramp if vertical else ramp.transpose(Image.Transpose.ROTATE_90).resize(self.large_px)
        self.image.paste(Image.new("RGB", self.large_px, colour), mask=ramp)

    def line(self, points: tuple[Point, ...], width: float, colour: RGB) -> None:
        width_px = max(2, round(width * self.unit_px))
        self.draw.line(
            [self.at(point) for point in points], fill=colour, width=width_px, joint="curve"
        )

    def arc(
        self, at: Point, radius: float, start: float, sweep: float, width: float, colour: RGB
    ) -> None:
        x, y = self.at(at)
        r = radius * self.unit_px
        width_px = max(2, round(width * self.unit_px))
        self.draw.arc(
            (x - r, y - r, x + r, y + r), start, start + sweep, fill=colour, width=width_px
        )

    def disc(self, x: float, y: float, rx: float, ry: float, colour: RGB) -> None:
        self.draw.ellipse((x - rx, y - ry, x + rx, y + ry), fill=colour)

    def face(self, at: Point, radius: float, rng: random.Random) -> None:
        x, y = self.at(at)
        r = radius * self.unit_px
        eye = r * rng.uniform(0.2, 0.28)
        for side in (-1, 1):
            self.disc(x + side * r * 0.36, y - r * 0.2, eye, eye, COLOURS["white"])
            self.disc(x + side * r * 0.36, y - r * 0.2, eye * 0.5, eye * 0.5, COLOURS["black"])
        box = (x - r * 0.35, y - r * 0.1, x + r * 0.35, y + r * 0.42)
        self.draw.arc(box, 20, 160, fill=COLOURS["black"], width=max(2, round(r * 0.09)))

    def dots(self, at: Point, radius: float, rng: random.Random, colour: RGB) -> None:
        x, y = self.at(at)
        r = radius * self.unit_px
        turn = rng.uniform(0, math.pi)
        for k in range(4):
            angle = turn + k * math.pi / 2
            self.disc(
                x + r * 0.6 * math.cos(angle),
                y + r * 0.6 * math.sin(angle),
                r * 0.2,
                r * 0.2,
                colour,
            )

    def shape(self, name: str, at: Point, radius: float, colour: RGB, turn: float) -> None:
        x, y = self.at(at)
        r = radius * self.unit_px

        def polygon(*points: Point, fill: RGB = colour) -> None:
            cos, sin = math.cos(turn), math.sin(turn)
            self.draw.polygon(
                [
                    (x + r * (px * cos - py * sin), y + r * (px * sin + py * cos))
                    for px, py in points
                ],
                fill=fill,
            )

        def disc(px: float, py: float, rx: float, ry: float, fill: RGB = colour) -> None:
            cos, sin = math.cos(turn), math.sin(turn)
            self.disc(
                x + r * (px * cos - py * sin), y + r * (px * sin + py * cos), r * rx, r * ry, fill
            )

        shade: RGB = (colour[0] * 3 // 5, colour[1] * 3 // 5, colour[2] * 3 // 5)
        if name == "circle":
            disc(0, 0, 0.95, 0.95)
        elif name == "egg":
            disc(0, 0, 0.78, 1.0)
        elif name == "square":
            polygon((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85))
        elif name == "triangle":
            polygon((0, -1), (0.95, 0.75), (-0.95, 0.75))
        elif name == "diamond":
            polygon((0, -1.1), (0.8, 0), (0, 1.1), (-0.8, 0))
        elif name == "star":
            polygon(*_star(5, 0.45))
        elif name == "cross":
            a, b = 0.33, 0.95
            polygon(
                (-a, -b),
                (a, -b),
                (a, -a),
                (b, -a),
                (b, a),
                (a, a),
                (a, b),
                (-a, b),
                (-a, a),
                (-b, a),
                (-b, -a),
                (-a, -a),
            )
        elif name == "ring":
            width_px = max(3, round(r * 0.36))
            self.draw.ellipse((x - r, y - r, x + r, y + r), outline=colour, width=width_px)
        elif name == "heart":
            polygon(*_heart())
        elif name == "crescent":
            polygon(*_crescent())
        elif name == "flower":
            for k in range(6):
                disc(0.58 * math.cos(k * math.pi / 3), 0.58 * math.sin(k * math.pi / 3), 0.38, 0.38)
            disc(0, 0, 0.32, 0.32, COLOURS["yellow"] if colour[2] > 90 else COLOURS["white"])
        elif name == "house":
            polygon((-0.7, -0.1), (0.7, -0.1), (0.7, 0.9), (-0.7, 0.9))
            polygon((-0.95, -0.1), (0, -0.95), (0.95, -0.1), fill=shade)
            polygon((-0.18, 0.35), (0.18, 0.35), (0.18, 0.9), (-0.18, 0.9), fill=shade)
        elif name == "tree":
            polygon((-0.16, 0.3), (0.16, 0.3), (0.16, 1), (-0.16, 1), fill=shade)
            disc(0, -0.25, 0.75, 0.72)
        elif name == "mushroom":
            polygon((-0.25, 0), (0.25, 0), (0.32, 0.9), (-0.32, 0.9), fill=shade)
            polygon(
                *[
                    (0.95 * math.cos(a / 12 * math.pi), 0.1 - 0.95 * math.sin(a / 12 * math.pi))
                    for a in range(13)
                ]
            )
        elif name == "fish":
            disc(-0.15, 0, 0.72, 0.5)
            polygon((0.4, 0), (1.0, -0.5), (1.0, 0.5))
            disc(-0.5, -0.1, 0.11, 0.11, COLOURS["white"])
        else:
            raise ValueError(f"unknown shape {name!r}")

    def finish(self) -> Image.Image:
        return self.image.reduce(SUPERSAMPLING)


def _star(points: int, inner: float) -> list[Point]:
    corners = []
    for k in range(2 * points):
        radius, angle = (1.05 if k % 2 == 0 else inner), k * math.pi / points - math.pi / 2
        corners.append((radius * math.cos(angle), radius * math.sin(angle)))
    return corners


def _heart() -> list[Point]:
    steps = [k / 24 * 2 * math.pi for k in range(24)]
    return [
        (
            0.95 * math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t))
            / 16.5,
        )
        for t in steps
    ]


def _crescent() -> list[Point]:
    outer = [(math.cos(a), math.sin(a)) for a in (0.9 + k / 20 * 4.48 for k in range(21))]
    inner = [
        (0.42 + 0.8 * math.cos(a), 0.8 * math.sin(a))
        for a in (5.05 - k / 20 * 3.82 for k in range(21))
    ]
    return outer + inner
