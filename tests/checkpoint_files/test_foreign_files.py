"""Files with the name of weights that are none, or whose numbers are not read: said at once, in plain words."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base.layout import TensorInfo
from lora_trainer.families.files import recognise
from lora_trainer.families.files.locate import describe
from lora_trainer.families.files.weight_files import READABLE, refuse_quantised
from lora_trainer.lora_file.read import read_contents
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.checkpoint_files.layouts import network, text, vae


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, b"x" * 100)
    return buffer.getvalue()


HEADER = json.dumps(
    {"x.weight": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}
).encode()
SAFETENSORS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(256)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22ead\nsize 6938\n"
CONTENTS = {
    "Git LFS": (POINTER, "a pointer of Git LFS", "git lfs pull"),
    "login page": (b"<!DOCTYPE html>\n<html class=''><head><title>Sign", "is a web page", "download it again"),
    "refusal of the Hub": (b"Access to model a/b is restricted. Please log in.", "is text", "signed in"),
    "missing on the Hub": (b"Entry not found", "is text", "download it again"),
    "refusal in German": ("Der Zugriff wurde verweigert, gr\u00fc\u00dfe".encode(), "is text", "signed in"),
    "page with a mark": (b"\xef\xbb\xbf\n <HTML><body>404", "is a web page", "download it again"),
    "server's answer": (b'{"error":"Access to model is restricted"}', "is JSON text", "download it again"),
    "archive": (zipped("model.safetensors"), "is a compressed archive", "unpack"),
    "torch.save": (zipped("archive/data.pkl"), "is a pickle", "safetensors"),
    "old pickle": (b"\x80\x02}q\x00(X\x05\x00\x00\x00", "is a pickle", "safetensors"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(64), "is a picture", "download it again"),
    "nothing": (b"", "is empty", "download it again"),
    "database": (b"SQLite format 3\0" + b"\x10" * 300, "is a file of another kind", "download it again"),
    "tape archive": (b"model/" + bytes(94) + b"0000755", "is a file of another kind", "download it again"),
    "text of Windows": ('{"error": "x"}'.encode("utf-16"), "is a file of another kind", "download it again"),
    "length of a header alone": (b"\x08" + bytes(7), "is a file of another kind", "download it again"),
    "beside the file": (b"\0\5\x16\7\0\2\0\0Mac OS X" + bytes(99), "what macOS writes", r"without \._"),
    "zeros": (bytes(4096), "begins with zeros", "download it again"),
    "a download that stopped": (SAFETENSORS[:-100], r"bytes, its header says 3\d\d", "download|whole"),
    "a download that stopped early": (SAFETENSORS[:40], "is not a", "download|whole"),
}  # fmt: skip
AS_GGUF = ("Git LFS", "login page", "server's answer", "nothing", "torch.save")


def as_base(file: Path) -> object:
    return describe(BaseSettings(model=str(file)))


def as_vae(file: Path) -> object:
    from tests.fakes.family_bases import base_of

    return describe(BaseSettings(model=str(base_of("sd15")), vae=str(file)))


READERS: dict[str, Callable[[Path], object]] = {
    "base.model": as_base,
    "base.vae": as_vae,
    "a LoRA": read_contents,
}


def refusal(read: Callable[[Path], object], file: Path) -> InputError:
    with pytest.raises(InputError) as raised:
        read(file)
    assert "\n" not in str(raised.value) and file.name in raised.value.found
    return raised.value


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_file_that_is_no_weights_is_called_what_it_is(kind: str, tmp_path: Path) -> None:
    content, said, fix = CONTENTS[kind]
    names = ["model.safetensors", *(["model.gguf"] if kind in AS_GGUF else [])]
    for name in names:
        (file := tmp_path / name).write_bytes(content)
        for reader, read in READERS.items():
            if name.endswith(".gguf") and reader == "a LoRA":
                continue
            error = refusal(read, file)
            assert re.search(said, error.found), (reader, error.found)
            assert re.search(fix, error.fix), (reader, error.fix)
            assert "5,7" not in error.found, "a length that the first bytes happen to be"


def test_a_file_under_the_other_format_s_name_is_told_its_own(tmp_path: Path) -> None:
    case = Case("flux", {"img_in.weight": (8, 32)}, dtype="Q8_0", file="flux.gguf")
    gguf = write(case, tmp_path)
    renamed = gguf.rename(tmp_path / "flux-Q8_0.safetensors")
    error = refusal(as_base, renamed)
    assert "is a GGUF under another name" in error.found and "flux-Q8_0.gguf" in error.fix
    (file := tmp_path / "base.gguf").write_bytes(SAFETENSORS)
    error = refusal(as_base, file)
    assert "is a safetensors file under another name" in error.found
    assert "base.safetensors" in error.fix


def test_a_header_that_is_as_long_as_a_word_is_still_read(tmp_path: Path) -> None:
    """Its length may be the letters of a bracket and a quote."""
    blanks = b" " * (0x227B - len(HEADER))
    file = tmp_path / "LoRA.safetensors"
    file.write_bytes(struct.pack("<Q", 0x227B) + HEADER + blanks + bytes(256))
    assert file.read_bytes()[:2] == b'{"'
    assert "an unknown architecture" in refusal(as_base, file).found


# ---- quantised


def layout(**stated: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    content = json.dumps(stated).encode()
    return {"double_blocks.0.img_attn.qkv.comfy_quant": ("U8", (len(content),), content)}


def scales(dtype: str, *shape: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    size = {"F32": 4, "F8_E4M3": 1, "U8": 1, "F8_E8M0": 1}[dtype]
    for length in shape:
        size *= length
    return {"double_blocks.0.img_attn.qkv.weight_scale": (dtype, shape, bytes(size))}


FP8 = "F8_E4M3"
ROWS, COLUMNS = 9216, 3072
QUANTISED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mxfp8 without its word": (FP8, scales("F8_E8M0", ROWS, COLUMNS // 32), "as mxfp8, fp8 in blocks"),
    "fp8 in blocks": (FP8, scales("F32", ROWS // 128, COLUMNS // 128), "as fp8 in blocks"),
    "one layer of nvfp4": ("U8", layout(format="nvfp4") | scales(FP8, ROWS, COLUMNS // 16), "as nvfp4, but the scale"),
    "one layer of int8": ("I8", layout(format="int8_tensorwise") | scales("F32", ROWS, 1), r"\(.*weight is I8\)"),
    "int8 ConvRot without scales": ("I8", layout(format="int8_tensorwise", convrot=True), "as int8_tensorwise ConvRot"),
    "4 bits ConvRot": ("I8", layout(format="convrot_w4a4"), "as convrot_w4a4 "),
    "int8 of others": ("I8", {}, r"\(.*weight is I8\)"),
    "a layout of tomorrow": (FP8, layout(format="fp5_dream"), "as fp5_dream"),
}  # fmt: skip


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantisation_that_is_not_read_is_refused_by_a_plan(kind: str, tmp_path: Path) -> None:
    """mxfp8 passed a plan and failed when everything was cached."""
    dtype, beside, said = QUANTISED[kind]
    case = Case(kind, network("flux"), dtype=dtype, beside=beside, file="flux1-dev.safetensors")
    file = write(case, tmp_path)
    error = refusal(as_base, file)
    assert re.search(f"is quantised {said}", error.found), error.found
    assert READABLE in error.found and error.fix


@pytest.mark.parametrize(
    "beside",
    [
        layout(format="float8_e4m3fn") | scales("F32"),
        layout(format="float8_e4m3fn") | scales("F32", 1),
        layout(format="float8_e5m2", full_precision_matrix_mult=True) | scales("F32", ROWS, 1),
        scales("F32", ROWS),
    ],
)
def test_fp8_with_a_scale_per_tensor_or_row_is_read(beside: Any, tmp_path: Path) -> None:
    file = write(
        Case("fp8", network("flux"), dtype=FP8, beside=beside, file="flux1-dev.safetensors"),
        tmp_path,
    )
    assert describe(BaseSettings(model=str(file))).family == "flux"


def test_parts_in_files_of_their_own_are_looked_at_too(tmp_path: Path) -> None:
    base = write(Case("flux", network("flux"), file="flux1-dev.safetensors"), tmp_path)
    for setting, shapes in (("vae", vae(16)), ("text_encoders", text("t5xxl"))):
        name = f"{setting}.safetensors"
        file = write(Case(setting, shapes, dtype="I8", file=name), tmp_path)
        value: Any = str(file) if setting == "vae" else (str(file),)
        with pytest.raises(InputError, match=f"{name} is quantised"):
            describe(BaseSettings(model=str(base), **{setting: value}))
        with pytest.raises(InputError, match="is quantised"):
            refuse_quantised(file)


def test_the_page_lists_what_is_read_in_the_words_of_the_messages() -> None:
    page = Path(families.__file__).parents[2] / "docs" / "models.md"
    assert READABLE in " ".join(page.read_text(encoding="utf-8").split())


def test_a_model_that_has_become_a_family_is_not_refused_by_its_old_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header = {"t5_yproj.weight": TensorInfo(dtype="F16", shape=(8, 8))}
    assert recognise.other_model(header, family="", file_name="mochi_1") == "Mochi, a video model"
    monkeypatch.setattr(recognise, "head", lambda family: {"name": "Mochi, a video model of today"})
    assert recognise.other_model(header, family="", file_name="mochi_1") is None
