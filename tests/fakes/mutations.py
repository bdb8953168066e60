"""Seeded damage to files: bytes flipped, cut, doubled and swapped, JSON made deep, huge and strange."""

from __future__ import annotations

import json
import random
from typing import Any

TOKENS = (
    b"[" * 3_000,
    b'{"a":' * 3_000,
    b"[" * 100_000,
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5_000,
    b"-1",
    b"18446744073709551616",
    b"null",
    b"true",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"\xef\xbb\xbf",
    b"\x00",
    b"\xff\xfe",
    b"\xe2\x80\xa8",
    b"\r",
    b"\n",
    b",",
    b"}",
    b"]",
    b"{}",
    b"../../etc/passwd",
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**63, 2**64, 10**400, 1e308, float("nan"), float("inf"), "", "\0",
    "\ud800", "../..", "auto", "x" * 70_000, [], [[]], {}, {"value": 1}, [1, 2], [-1, 5], [0, 2**70],
    ["a"], {"": {}}, [None],
)  # fmt: skip


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return `data` after one to four accidents."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        data = _accident(data, draw)
    return data


def _accident(data: bytes, draw: random.Random) -> bytes:
    at, end = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
    match draw.randrange(7):
        case 0:
            flipped = bytearray(data)
            for _ in range(min(len(data), draw.choice((1, 1, 8)))):
                flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            return bytes(flipped)
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:end] + data[at:end] + data[end:]
        case 4:
            return data[:at] + bytes(end - at) + data[end:]
        case 5:
            return data[:at] + draw.randbytes(draw.randint(1, 40)) + data[at:]
        case _:
            return data[:at] + draw.choice(TOKENS) + data[at:]


def mutated_json(value: Any, draw: random.Random) -> Any:
    """Return a JSON value in which something, somewhere, is missing, of another kind or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        rest = {name: inner for name, inner in value.items() if name != key}
        match draw.randrange(4):
            case 0:
                return rest
            case 1:
                return {**rest, draw.choice(("", "\0", key.upper(), key + "x", "é")): value[key]}
            case _:
                return {**value, key: mutated_json(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        match draw.randrange(3):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[: at + 1] + value[at:]
            case _:
                return [*value[:at], mutated_json(value[at], draw), *value[at + 1 :]]
    return draw.choice(VALUES)


def damaged_json(value: Any, draw: random.Random) -> bytes:
    """Return a JSON file with damage to its values, to its bytes, or both."""
    for _ in range(draw.choice((0, 1, 2))):
        value = mutated_json(value, draw)
    data = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    return mutated(data, draw) if draw.random() < 0.5 else data


def damaged_header(file: bytes, draw: random.Random) -> bytes:
    """Return a safetensors file with another header, its length mostly right."""
    length = int.from_bytes(file[:8], "little")
    header = damaged_json(json.loads(file[8 : 8 + length]), draw)
    stated = draw.choice((len(header),) * 6 + (0, 1, len(header) + 1, 1 << 30, (1 << 64) - 1))
    body = file[8 + length :]
    if draw.random() < 0.2:
        body = mutated(body, draw)
    return stated.to_bytes(8, "little") + header + body
