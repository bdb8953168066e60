"""Dataset folders as other trainers and tools write them: generators, each with the reading that is expected.

Named by tool and version. Names of files, keys and columns are those of the tools' own documentation; the
contents are made up.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import ExifTags, Image, PngImagePlugin


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Files by path, and their expected reading.

    `captions`: of each image to learn, None where it has none; `repeats`: other than 1; `regularisation`: names
    of images; `said` and `unsaid`: kinds of findings that must and must not be there; `findings`: all of them, as
    "severity kind code file: sentence", where "..." leaves out an end, or as "kind file"; `sources`: of some
    captions; `error`: in place of all that.
    """

    tool: str
    case: str
    files: Mapping[str, bytes]
    captions: Mapping[str, str | None] = field(default_factory=dict)
    repeats: Mapping[str, int] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    regularisation: Collection[str] = ()
    said: Collection[str] = ()
    unsaid: Collection[str] = ("metadata", "ignored-files", "unused-caption", "two-captions")
    advice: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    sources: Mapping[str, str | None] = field(default_factory=dict)
    findings: Collection[str] | None = None


def image(name: str, **saving: Any) -> bytes:
    """Return a small image whose bytes depend on its name; masks are half white."""
    colour = sum(ord(letter) * (place + 7) for place, letter in enumerate(name))
    pixels = Image.new("RGB", (48, 32), (colour % 251, colour * 7 % 241, colour * 3 % 239))
    pixels.paste((255, 255, 255), (0, 0, 20, 20))
    data = io.BytesIO()
    kind = {"jpg": "JPEG", "webp": "WEBP"}.get(name.rpartition(".")[2], "PNG")
    pixels.save(data, kind, **saving)
    return data.getvalue()


def images(*names: str) -> dict[str, bytes]:
    return {name: image(name) for name in names}


def texts(**by_name: str) -> dict[str, bytes]:
    """Return caption files: `a="cat"` is a.txt."""
    return {f"{name}.txt": text.encode() for name, text in by_name.items()}


def lines(*rows: Mapping[str, Any]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def js(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode()


def png_text(name: str, **chunks: str) -> bytes:
    info = PngImagePlugin.PngInfo()
    for key, text in chunks.items():
        info.add_itxt(key, text)
    return image(name, pnginfo=info)


def exif(name: str, fill: Callable[[Image.Exif], None]) -> bytes:
    tags = Image.Exif()
    fill(tags)
    return image(name, exif=tags.tobytes())


def user_comment(tags: Image.Exif) -> None:
    comment = b"UNICODE\0" + "a red cat\nNegative prompt: dog\nSteps: 20".encode("utf-16-be")
    tags.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment


def empty_comment(tags: Image.Exif) -> None:
    tags.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = b"JIS\0\0\0\0\0" + b" " * 4


def image_description(tags: Image.Exif) -> None:
    tags[ExifTags.Base.ImageDescription] = "a red cat"


def plain(case: str, files: Mapping[str, bytes], **expected: Any) -> Layout:
    return Layout(tool="any", case=case, files=files, **expected)


def saved(pixels: Image.Image, kind: str = "PNG", **saving: Any) -> bytes:
    data = io.BytesIO()
    pixels.save(data, kind, **saving)
    return data.getvalue()


def masks(*names: str) -> dict[str, bytes]:
    """Return masks of the images that `image` gives, white in a corner."""
    pixels = Image.new("L", (48, 32))
    pixels.paste(255, (0, 0, 5, 5))
    return {name: saved(pixels, "WEBP" if name.endswith("webp") else "PNG") for name in names}


TWO = images("a.png", "b.jpg")
CATDOG = {"a.png": "a cat", "b.jpg": "a dog"}
INSIDE = {"data.caption_fallback": "metadata"}
NAMES = {"data.caption_fallback": "file_name"}
META_CAP = {"a": {"caption": "a cat", "tags": "red, small"}, "b": {"caption": "a dog"}}
MASKS = {"data.masks": "files"}
CASES = [{"file_name": name, "text": name} for name in ("a.png", "caf\u00e9.png", "b.png")]
ODD_NAMES = ("sp ace.png", "\u732b.png", "a'b\"c.png", "%s {a|b}.png", os.fsdecode(b"caf\xe9.png"))
PHOTOS = images("one.webp", "two.webp")

LAYOUTS = (
    # sd-scripts and what is built on it
    Layout(tool="sd-scripts v0.9.1", case="fine-tuning metadata by stem", files={**TWO, "meta_cap.json": js(META_CAP)},
           captions={"a.png": "a cat, red, small", "b.jpg": "a dog"}),
    Layout(tool="sd-scripts v0.9.1", case="two steps of metadata, the later one counts",
           files={**TWO, "meta_cap.json": js({"a": "old", "b": "a dog"}), "meta_clean.json": js({"a": "a cat"})},
           captions=CATDOG, said=("two-captions",), unsaid=("metadata",)),
    Layout(tool="sd-scripts v0.9.1", case="regularisation folder that the settings name",
           files={**images("1_cat/a.png", "reg/1_cat/b.png")}, captions={"1_cat/a.png": "cat"},
           regularisation=("reg/1_cat/b.png",), settings={"data.folders.reg.regularisation": True}),
    Layout(tool="kohya_ss v25.2.1", case="project with img, reg, log and model",
           files={**images("img/8_zb cat/a.png", "reg/1_cat/b.png", "model/sample/c.png"), "log/x": b"",
                  "img/8_zb cat/a.txt": b"zb, a cat"},
           captions={"img/8_zb cat/a.png": "zb, a cat"}, repeats={"img/8_zb cat/a.png": 8},
           said=("aside-folder", "subfolder"), advice="data.folders.reg.regularisation=true"),
    # OneTrainer
    Layout(tool="OneTrainer 2025-09", case="condition images", files=images("a.png", "a-condlabel.png"),
           captions={"a.png": None}, said=("control-images",)),
    Layout(tool="OneTrainer 2025-09", case="an image whose name ends in condlabel", files=images("b-condlabel.png"),
           captions={"b-condlabel.png": None}, unsaid=("control-images",)),
    Layout(tool="OneTrainer 2025-09", case="captions from file names", files=images("a_red cat-001.png", "dog (2).png"),
           captions={"a_red cat-001.png": "a red cat", "dog (2).png": "dog"}, settings=NAMES),
    # ai-toolkit, SimpleTuner, diffusion-pipe, musubi-tuner, DiffSynth, XLabs
    Layout(tool="ai-toolkit 2025-09", case="control and mask folders",
           files={**images("data/a.png", "control/a.png", "mask/a.png"), "data/a.txt": b"a cat"},
           captions={"data/a.png": "a cat"}, masks={"data/a.png": "mask/a.png"}, said=("aside-folder",),
           settings={"data.masks": "files"}),
    Layout(tool="SimpleTuner v3.0", case="parquet strategy, the package is missing",
           files={**images("a.png"), "metadata.parquet": b"PAR1"}, error="pip install pyarrow"),
    Layout(tool="diffusion-pipe 2025-09", case="captions.json with lists",
           files={**TWO, "captions.json": js({"a.png": ["a cat", "a red cat"], "b.jpg": ["a dog"]})},
           captions={"a.png": "a cat a red cat", "b.jpg": "a dog"}),
    Layout(tool="musubi-tuner v0.2.12", case="JSONL with paths of another machine",
           files={**images("x/a.png", "x/b.png"), "metadata.jsonl": lines(
               {"image_path": "/data/x/a.png", "caption": "a cat"},
           {"image_path": "D:\\x\\b.png", "caption": "a dog"})}, captions={"x/a.png": "a cat", "x/b.png": "a dog"}),
    # other trainers
    Layout(tool="EveryDream2 2023-09", case="captions in file names, offered", files=images("a photo of a cat_1.jpg"),
           captions={"a photo of a cat_1.jpg": None}, said=("no-caption",), advice="data.caption_fallback=file_name"),
    Layout(tool="TagGUI 1.33", case="tags in .txt, and a JSON file of its own",
           files={**images("a.png"), "a.txt": b"cat, red", "settings.json": b"{}"}, captions={"a.png": "cat, red"},
           said=("ignored-files",), unsaid=("metadata",)),
    Layout(tool="BLIP captioner 2022", case="captions.txt with colons", files={**TWO, "captions.txt":
           b"a.png: a cat\nb.jpg: a dog\n"}, captions=CATDOG),
    Layout(tool="spreadsheet, European", case="semicolons and a byte order mark",
           files={**TWO, "captions.csv": "\ufeffImage;Caption\r\na.png;a cat\r\nb.jpg;a dog\r\n".encode()},
           captions=CATDOG),
    # downloaders and collections
    Layout(tool="gallery-dl 1.30", case="NAME.EXT.json with tags",
           files={**images("a.png"), "a.png.json": js({"id": 3, "tags": ["cat", "red"]})},
           captions={"a.png": "cat, red"}),
    Layout(tool="img2dataset 1.47", case="files output: .txt and .json with the same caption", files={
               **images("00000/000000001.jpg"), "00000/000000001.txt": b"a cat",
               "00000/000000001.json": js({"caption": "a cat", "url": "x", "status": "success"})},
           captions={"00000/000000001.jpg": "a cat"}),
    Layout(tool="Flickr8k", case="captions.txt of five captions an image",
           files={**images("Images/1.jpg"), "captions.txt": b"image,caption\n1.jpg,A cat .\n1.jpg,A red cat .\n"},
           captions={"Images/1.jpg": "A red cat ."}, said=("metadata",), unsaid=("unused-caption",)),
    Layout(tool="COCO 2017 captions", case="captions.json", files={**images("images/1.jpg"), "captions.json": js({
               "images": [{"id": 7, "file_name": "1.jpg"}],
               "annotations": [{"image_id": 7, "caption": "a cat"}, {"image_id": 7, "caption": "a red cat"}]})},
           captions={"images/1.jpg": "a cat a red cat"}),
    # text inside images
    Layout(tool="AUTOMATIC1111 v1.10 outputs", case="parameters, offered",
           files={"1.png": png_text("1.png", parameters="a red cat\nNegative prompt: dog\nSteps: 20")},
           captions={"1.png": None}, said=("no-caption",), advice="data.caption_fallback=metadata"),
    Layout(tool="AUTOMATIC1111 v1.10 outputs", case="UserComment of a JPEG",
           files={"1.jpg": exif("1.jpg", user_comment)}, captions={"1.jpg": "a red cat"}, settings=INSIDE),
    Layout(tool="Japanese cameras", case="a blank UserComment in JIS", files={"1.jpg": exif("1.jpg", empty_comment)},
           captions={"1.jpg": None}, said=("no-caption",), settings=INSIDE),
    Layout(tool="ComfyUI 0.3.50 outputs", case="a workflow is no caption",
           files={"1.png": png_text("1.png", prompt='{"3": {"class_type": "KSampler"}}', workflow="{}")},
           captions={"1.png": None}, said=("no-caption",), settings=INSIDE),
    Layout(tool="Lightroom 14", case="ImageDescription", files={"1.jpg": exif("1.jpg", image_description)},
           captions={"1.jpg": "a red cat"}, settings=INSIDE),
    # what wins over what, and damage
    Layout(tool="any", case="a table comes before text inside and names", files={
               "1.png": png_text("1.png", Description="a dog"), "metadata.csv": b"file_name,text\n1.png,a cat\n"},
           captions={"1.png": "a cat"}, settings=INSIDE),
    Layout(tool="any", case="a table without captions", files={**images("a.png"), "metadata.csv": b"x,y\n1,2\n"},
           captions={"a.png": None}, said=("metadata",), unsaid=()),
    Layout(tool="any", case="an image called captions", files={**images("captions.png"), "captions.txt": b"a cat"},
           captions={"captions.png": "a cat"}),
    Layout(tool="any", case="JSON beside an image, without a caption", files={**PHOTOS, "one.json": js({"width": 3})},
           captions={"one.webp": None, "two.webp": None}, said=("caption-text",)),
    # one folder, its layout
    plain("the order of extensions is a setting", {**images("a.png"), "a.txt": b"text", "a.caption": b"caption"},
           captions={"a.png": "caption"}, settings={"data.caption_extensions": ["caption", "txt"]}, findings=(
               "warning two-captions CAP-01 images with two captions, of which the first counts (1): a.png (a.ca...",
           )),
    plain("two levels are read", images("a.png", "10_x/b.png", "10_x/deep/c.png", "10_x/deep/er/d.png"),
           captions={"a.png": None, "10_x/b.png": "x", "10_x/deep/c.png": "x"}, repeats={"10_x/b.png": 10,
               "10_x/deep/c.png": 10}, findings=(
               "warning no-caption CAP-01 1 of 3 images have no caption but the trigger, if one is set: a.png",
               "warning deep-folder 10_x/deep/er: is not read, it lies 3 folders deep",
               "note no-caption CAP-01 2 of 3 images have no caption but their folder's name: 10_x/b.png, 10_x/d...",
               "note subfolder 10_x/: its images (1) are seen 10 times per epoch", "subfolder 10_x/deep/",
           )),
    plain("documents and hidden files", {
               **images("a.png"), "a.txt": b"x", ".hidden.png": b"no", "._a.png": b"no", "README.md": b"no",
               "readme.txt": b"no",
               "LICENSE": b"no", "Thumbs.db": b"no", "__MACOSX/x.png": b"no"}, captions={"a.png": "x"}, findings=()),
    plain("files of no use", {
               **images("a.png"), "a.txt": b"x", "a.npz": b"", "b.npz": b"", "c.ZIP": b"", "sub/d.npz": b"",
               "noext": b""}, captions={"a.png": "x"}, findings=(
               "note ignored-files files that are neither image nor caption are ignored: 3 .npz, 1 .zip, 1 witho...",
           )),
    plain("too many repeats", images("1001_cat/a.png"), error="folder 1001_cat means 1001 repeats"),
    plain("settings for a folder that is none", images("more/a.png"),
           settings={"data.folders.moer.repeats": 2}, error="'moer', which is no subfolder. Did you mean 'more'?"),
    # tables
    plain("tables at the root and inside", {
               **images("a.png", "b.png", "train/c.png", "train/d.png"), "metadata.jsonl": lines(
                   {"file_name": "a.png", "text": "text"}, {"file_name": "b.png", "tags": ["red", "hat"]},
                   {"file_name": "train/c.png", "prompt": "root"}, {"file_name": "gone.png", "text": "nobody"},
                   {"file_name": "../../etc/passwd", "text": "nobody"}),
               "train/metadata.jsonl": lines({"file_name": "d.png", "text": "inside"})},
           captions={"a.png": "text", "b.png": "red, hat", "train/c.png": "root", "train/d.png": "inside"},
           sources={"a.png": "metadata.jsonl", "train/d.png": "train/metadata.jsonl"}, findings=(
               "warning unused-caption CAP-01 captions without an image (2): ../../etc/passwd, gone.png",
               "subfolder train/",
           )),
    plain("a row of an image that was taken out", {
               **images("a.png", "_excluded/out.png"), "a.txt": b"x", "metadata.jsonl": lines(
                   {"file_name": "gone.png", "text": "x"}, {"file_name": "out.png", "text": "x"})},
           captions={"a.png": "x"}, findings=("unused-caption", "note excluded _excluded/: is not read",)),
    plain("one row, two images that differ in case", {
               **images("A.PNG", "a.png", "cafe\u0301.png", "b.png"), "metadata.jsonl": lines(*CASES)},
           captions={"A.PNG": "a.png", "a.png": "a.png", "b.png": "b.png", "cafe\u0301.png": "caf\u00e9.png"},
               findings=("warning ambiguous-caption IMG-08 a.png: is the caption of 2 images: A.PNG, a.png",)),
    plain("two rows, two images that differ in case", {**images("A.PNG", "a.png", "cafe\u0301.png", "b.png"),
               "metadata.jsonl": lines(*CASES, {"file_name": "A.PNG", "text": "its own"})},
           captions={"A.PNG": "its own", "a.png": "a.png", "b.png": "b.png", "cafe\u0301.png": "caf\u00e9.png"},
               findings=()),
    plain("a table that contradicts a caption file", {
               **images("a.png", "b.png"), **texts(a="a cat", b="a cat"), "metadata.jsonl": lines(
                   {"file_name": "a.png", "text": "a dog"}, {"file_name": "b.png", "text": "a cat"})},
           captions={"a.png": "a cat", "b.png": "a cat"}, findings=(
               "warning two-captions a.png: has two captions; a.txt is used, metadata.jsonl is not",
           )),
    plain("damaged rows in a table", {**images("a.png", "b.png", "c.png", "s.png"), "metadata.jsonl": b"\n".join((
                   b'\xef\xbb\xbf{"file_name": "a.png", "text": "a"}',
                   b'{"file_name": "a.png", "text": ["one", " two ", ""]}', b"{nonsense", b'["a.png"]',
                   b'{"file_name": 3, "text": "x"}', b'{"file_name": "b.png", "text": ["one", 2]}', b"[" * 100_000,
                   b'{"file_name": "s.png", "text": "\\ud800"}',
                   b'{"file_name": ".\\\\b.png", "prompt": "no", "text": "first\\nkey wins"}',
                   '{"file_name": "./c.png", "prompt": "four\u2028five"}'.encode(), b""))},
           captions={"a.png": "one", "s.png": "?", "b.png": "first key wins", "c.png": "four five"}, findings=(
               "warning metadata CAP-02 metadata.jsonl: a.png occurs again; the last row counts",
               "warning metadata CAP-02 metadata.jsonl: line 3: not JSON (...",
               'warning metadata CAP-02 metadata.jsonl: line 4: no {"file_name": "..."}',
               'warning metadata CAP-02 metadata.jsonl: line 5: no {"file_name": "..."}',
               "warning metadata CAP-02 metadata.jsonl: line 6: no text under text, caption, prompt",
               "warning metadata CAP-02 metadata.jsonl: 1 more lines like these",
           ), settings={"data.caption_lines": "one"}),
    # caption files
    plain("no caption, an empty one", {
               **images("a.png", "b.png", "c.png"), "b.txt": b"\xef\xbb\xbf \r\n", "c.txt": b"x"},
           captions={"a.png": None, "b.png": None, "c.png": "x"}, sources={"a.png": None}, findings=("no-caption",)),
    plain("an empty caption in a numbered folder", {
               **images("3_cat/a.png"), "3_cat/a.txt": b" ", "metadata.jsonl": lines({"file_name": "3_cat/a.png",
               "text": ""})},
           captions={"3_cat/a.png": "cat"}, repeats={"3_cat/a.png": 3}, sources={"3_cat/a.png": "folder name"},
               findings=("no-caption", "subfolder 3_cat/",)),
    plain("odd names", {**images(*ODD_NAMES), **{f"{name[:-4]}.txt": b"x" for name in ODD_NAMES}},
           captions=dict.fromkeys((*ODD_NAMES[:-1], "caf\\xe9.png"), "x"), findings=()),
    plain("caption files by the exact name, else by one that differs in case or composition", {
               **images("a.png", "B.png", "caf\u00e9.png", "cafe\u0301.png", "cre\u0300me.png"), "a.txt": b"a",
               "A.TXT": b"A", "b.caption": b"b", "caf\u00e9.txt": b"red", "cafe\u0301.txt": b"blue",
               "cr\u00e8me.txt": b"white"},
           captions={"a.png": "a", "B.png": "b", "caf\u00e9.png": "red", "cafe\u0301.png": "blue",
               "cre\u0300me.png": "white"}, findings=()),
    plain("captions without an image", {
               **images("a.png"), "a.txt": b"x", "a.caption": b"x", "b.txt": b"x", "c.caption": b"x"},
           captions={"a.png": "x"}, findings=("unused-caption",)),
    plain("a placeholder without a trigger", {**images("a.png"), "a.txt": b"[trigger] in a tree"},
           captions={"a.png": "[trigger] in a tree"}, findings=(
               "warning no-trigger a.png: is captioned with [trigger], and there is no trigger",
           )),
    plain("an empty folder", {"sub/x/deep/a.txt": b"", "pictures.zip": b""}, error="1 .zip"),
    # masks
    plain("masks beside the images and in folders", {
               **images("a.png", "b.JPG", "c.png", "10_x/d.png", "10_x/e.png"), **masks("a-masklabel.png",
               "masks/a.png", "masks/B.png",
               "masks/c-masklabel.png", "10_x/masks/d.webp")},
           captions={"a.png": None, "b.JPG": None, "c.png": None, "10_x/d.png": "x", "10_x/e.png": "x"},
           repeats={"10_x/d.png": 10, "10_x/e.png": 10}, settings=MASKS, findings=(
               "no-caption", "warning no-mask 1 of 5 images have no mask, all of them counts: 10_x/e.png",
               "no-caption", "subfolder 10_x/",
           ), masks={"a.png": "a-masklabel.png", "b.JPG": "masks/B.png", "c.png": "masks/c-masklabel.png",
               "10_x/d.png": "10_x/masks/d.webp"}),
    plain("a folder called masks with images to learn", images("a.png", "masks/venice.png"),
           captions={"a.png": None, "masks/venice.png": None}, findings=("no-caption", "subfolder masks/",)),
    plain("a folder called masks where masks are asked for", images("a.png", "masks/venice.png"),
           captions={"a.png": None}, settings=MASKS, findings=(
               "no-caption", "no-mask", "warning unused-mask masks without an image (1): masks/venice.png",
           )),
    plain("masks of images that were taken out", {
               **images("a.png", "_excluded/b.jpg", "10_x/c.png", "_excluded/10_x/d.png"), **masks("a-masklabel.png",
               "b-masklabel.png",
               "10_x/c-masklabel.png", "10_x/d-masklabel.png")},
           captions={"a.png": None, "10_x/c.png": "x"}, repeats={"10_x/c.png": 10},
           settings=MASKS, findings=("no-caption", "no-caption", "subfolder 10_x/", "excluded _excluded/",),
           masks={"a.png": "a-masklabel.png", "10_x/c.png": "10_x/c-masklabel.png"}),
    plain("masks that mean nothing", {
               **images("a.png", "b.png", "c.png"), "a-masklabel.png": saved(Image.new("L", (48, 32))),
               "b-masklabel.png": saved(Image.new("L", (64, 32), 255)),
               "c-masklabel.png": saved(Image.new("L", (26, 16), 9))},
           captions={"c.png": None}, masks={"c.png": "c-masklabel.png"}, settings={**MASKS,
               "data.max_bad_fraction": 0.9}, findings=(
               "error bad-mask IMG-04 a-masklabel.png: is black everywhere: nothing would be learned",
               "error bad-mask IMG-04 b-masklabel.png: is 64x32, not of the shape of its image, 48x32",
               "no-caption",
           )),
    plain("an image that is transparent everywhere", {
               "a.png": saved(Image.new("RGBA", (20, 20), (255, 0, 0, 0))), **images("b.png")},
           captions={"b.png": None}, settings={"data.masks": "alpha", "data.max_bad_fraction": 0.9}, findings=(
               "error bad-mask IMG-04 a.png: is transparent everywhere: nothing would be learned", "no-caption",
               "no-mask",
           )),
    # regularisation
    plain("all images are of the class", images("a.png"),
           settings={"data.folders": {".": {"regularisation": True}}}, error="none is left to learn"),
)  # fmt: skip
