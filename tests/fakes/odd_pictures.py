"""Images as cameras, scanners and vandals make them; what Pillow does not write is made by hand."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def picture(width_px: int = 48, height_px: int = 32) -> Image.Image:
    """An RGB image without symmetry: smooth colours and a red top left corner."""
    x, y = np.meshgrid(np.linspace(40, 200, width_px), np.linspace(20, 180, height_px))
    image = Image.fromarray(np.stack([y * 0 + 60, x, y], axis=-1).astype(np.uint8))
    image.paste("red", (0, 0, 8, 4))
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(
    width_px: int, height_px: int, depth: int, colour: int, rows: bytes, *chunks: bytes
) -> bytes:
    """A PNG made by hand, for what Pillow does not write."""
    header = struct.pack(">IIBBBBB", width_px, height_px, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def stored_for(orientation: int, upright: Image.Image) -> Image.Image:
    """How a camera stores `upright` under an EXIF orientation (the inverse of showing it)."""
    turn = Image.Transpose
    inverse = {
        1: None,
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_90,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_270,
    }[orientation]
    return upright if inverse is None else upright.transpose(inverse)


def cmyk_profile(cyan: tuple[int, int, int]) -> bytes:
    """A CMYK profile that shows cyan ink as this Lab colour, any other mixture as gray."""
    white, gray, black = (255, 128, 128), (128, 128, 128), (0, 128, 128)
    inks = {0b0000: white, 0b1000: cyan, 0b1111: black}
    table = b"".join(bytes(inks.get(mixture, gray)) for mixture in range(16))
    identity = bytes(range(256))
    matrix = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    lut = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + matrix + identity * 4 + table + identity * 3
    point = b"XYZ " + bytes(4) + struct.pack(">3i", 63190, 65536, 54061)
    text = b"text" + bytes(4) + b"x\0\0\0"
    parts = [(b"A2B0", lut), (b"wtpt", point), (b"desc", text), (b"cprt", text)]
    offset = 128 + 4 + 12 * len(parts)
    directory, body = struct.pack(">I", len(parts)), b""
    for kind, data in parts:
        padded = data.ljust(-(-len(data) // 4) * 4, b"\0")
        directory += kind + struct.pack(">II", offset + len(body), len(data))
        body += padded
    header = struct.pack(
        ">I4sI4s4s4s12s4s4sIIIQI3iI",
        offset + len(body), b"lcms", 0x02400000, b"prtr", b"CMYK", b"Lab ", bytes(12),
        b"acsp", b"APPL", 0, 0, 0, 0, 0, 63190, 65536, 54061, 0,
    )  # fmt: skip
    return header.ljust(128, b"\0") + directory + body
