"""How fast cards are: a table from the makers' data sheets, and a stand-in for those not in it.

Input is a card's name and memory; output a `Card`. Rates are ceilings; `step_time.py` knows which share
of them training reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card's 16-bit matrix rate with fp32 accumulation, and the rate of its memory.

    `stands_for` names a card that is not in the table and is taken for this one. Its int8 products are
    `int8_speedup` times as fast: four times on cards for games, which add 16-bit products up in fp32 at
    half the rate, else twice.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    int8_speedup: float = 2.0
    stands_for: str = ""


# TFLOP/s and GB/s.
_RATES: Mapping[str, tuple[float, float]] = {
    "B200": (1600, 8000), "H200": (790, 4300), "H100": (700, 3300), "A100": (250, 1550),
    "A10": (70, 600), "L4": (60, 300), "L40S": (180, 860), "V100": (100, 900),
    "Tesla T4": (30, 320), "RTX A6000": (140, 770), "RTX A5000": (100, 770), "RTX A4000": (70, 450),
    "RTX 5090": (200, 1790), "RTX 5080": (110, 960), "RTX 5070": (60, 670), "RTX 5060": (45, 450),
    "RTX 4090": (165, 1000), "RTX 4080": (95, 720), "RTX 4070": (58, 500), "RTX 4060": (30, 270),
    "RTX 3090": (71, 940), "RTX 3080": (59, 760), "RTX 3070": (40, 450), "RTX 3060": (25.5, 360),
    "RTX 2080": (40, 450), "RTX 2070": (30, 450), "RTX 2060": (25, 340),
    "MI300X": (1300, 5300), "MI210": (180, 1640), "RX 7900 XTX": (120, 960), "RX 7900 XT": (100, 800),
    "RX 9070": (150, 640), "RX 6900": (46, 510), "RX 6800": (32, 510), "Arc(TM) A770": (130, 560),
    "Arc(TM) B580": (115, 456), "Apple M1": (2.6, 68), "Apple M1 Max": (10, 400), "Apple M1 Ultra": (21, 800),
    "Apple M2": (3.6, 100), "Apple M2 Max": (13, 400), "Apple M2 Ultra": (27, 800), "Apple M3": (4.1, 100),
    "Apple M3 Max": (16, 400), "Apple M3 Ultra": (28, 820), "Apple M4": (4.6, 120), "Apple M4 Pro": (9, 273),
    "Apple M4 Max": (18, 546),
}  # fmt: skip
_FOR_GAMES = ("RTX 30", "RTX 40", "RTX 50")
# An ordinary card of up to so many GiB; the first that is enough stands for an unknown one.
_ORDINARY: tuple[tuple[float, str], ...] = (
    (6.5, "RTX 2060"),
    (9, "RTX 4060"),
    (13, "RTX 3060"),
    (17, "RTX 4060"),
    (26, "RTX 3090"),
    (34, "RTX 5090"),
    (50, "RTX A6000"),
)
_LARGEST = "A100"


def card(name: str, *, total_bytes: int) -> Card:
    """Return the card of that name: the longest known name in it, else an ordinary card of its size."""
    known = max((found for found in _RATES if found in name), key=len, default=None)
    if known is not None:
        return _card(known)
    size_gib = total_bytes / GIB
    ordinary = next((found for limit, found in _ORDINARY if size_gib <= limit), _LARGEST)
    return _card(ordinary, stands_for=name)


def _card(name: str, *, stands_for: str = "") -> Card:
    tflops, gigabytes = _RATES[name]
    return Card(
        name=name,
        flops_per_s=tflops * 1e12,
        bytes_per_s=gigabytes * 1e9,
        int8_speedup=4.0 if name.startswith(_FOR_GAMES) else 2.0,
        stands_for=stands_for,
    )
