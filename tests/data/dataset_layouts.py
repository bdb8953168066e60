"""Dataset folders as other trainers and tools write them: generators, each with the reading that is expected.

Named by tool and version. Names of files, keys and columns are those of the tools' own documentation; the
contents are made up.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import ExifTags, Image, PngImagePlugin


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Files by path, and their expected reading.

    `captions`: of each image to learn, None where it has none; `repeats`: other than 1; `regularisation`: names
    of images; `said` and `unsaid`: kinds of findings that must and must not be there; `error`: in its place.
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


def image_description(tags: Image.Exif) -> None:
    tags[ExifTags.Base.ImageDescription] = "a red cat"


XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:description><rdf:Alt>'
    '<rdf:li xml:lang="x-default">a red cat</rdf:li></rdf:Alt></dc:description></rdf:Description>'
    "</rdf:RDF></x:xmpmeta>"
)
TWO = images("a.png", "b.jpg")
CATDOG = {"a.png": "a cat", "b.jpg": "a dog"}
INSIDE = {"data.caption_fallback": "metadata"}
NAMES = {"data.caption_fallback": "file_name"}
CSV_ROWS = 'file_name,text\na.png,"a cat"\nb.jpg,a dog\n'
META_CAP = {"a": {"caption": "a cat", "tags": "red, small"}, "b": {"caption": "a dog"}}
PHOTOS = images("one.webp", "two.webp")

LAYOUTS = (
    # sd-scripts and what is built on it
    Layout(tool="sd-scripts v0.9.1", case="captions in .caption, its own default",
           files={**TWO, "a.caption": b"a cat", "b.caption": b"a dog\n"}, captions=CATDOG),
    Layout(tool="sd-scripts v0.9.1", case="TOML subset with .txt", files={**TWO, **texts(a="a cat", b="a dog")},
           captions=CATDOG),
    Layout(tool="sd-scripts v0.9.1", case="dreambooth folders with repeats",
           files={**images("10_zb cat/a.png", "2_dog/b.png"), "10_zb cat/a.txt": b"a cat"},
           captions={"10_zb cat/a.png": "a cat", "2_dog/b.png": "dog"},
           repeats={"10_zb cat/a.png": 10, "2_dog/b.png": 2}, said=("subfolder",)),
    Layout(tool="sd-scripts v0.9.1", case="fine-tuning metadata by stem", files={**TWO, "meta_cap.json": js(META_CAP)},
           captions={"a.png": "a cat, red, small", "b.jpg": "a dog"}),
    Layout(tool="sd-scripts v0.9.1", case="fine-tuning metadata with latents, absolute paths",
           files={**TWO, "a.npz": b"PK", "meta_lat.json": js({
               "C:\\train\\a.png": {"caption": "a cat", "train_resolution": [512, 512]},
               "/train/b.jpg": {"tags": "a dog"}})},
           captions=CATDOG, said=("ignored-files",), unsaid=("metadata", "unused-caption")),
    Layout(tool="sd-scripts v0.9.1", case="two steps of metadata, the later one counts",
           files={**TWO, "meta_cap.json": js({"a": "old", "b": "a dog"}), "meta_clean.json": js({"a": "a cat"})},
           captions=CATDOG, said=("two-captions",), unsaid=("metadata",)),
    Layout(tool="sd-scripts v0.9.1", case="regularisation folder that the settings name",
           files={**images("1_cat/a.png", "reg/1_cat/b.png")}, captions={"1_cat/a.png": "cat"},
           regularisation=("reg/1_cat/b.png",), settings={"data.folders.reg.regularisation": True}),
    Layout(tool="sd-scripts v0.9.1", case="masks as conditioning images",
           files=images("a.png", "conditioning/a.png"), captions={"a.png": None}, said=("aside-folder",)),
    Layout(tool="kohya_ss v25.2.1", case="project with img, reg, log and model",
           files={**images("img/8_zb cat/a.png", "reg/1_cat/b.png", "model/sample/c.png"), "log/x": b"",
                  "img/8_zb cat/a.txt": b"zb, a cat"},
           captions={"img/8_zb cat/a.png": "zb, a cat"}, repeats={"img/8_zb cat/a.png": 8},
           said=("aside-folder", "subfolder"), advice="data.folders.reg.regularisation=true"),
    Layout(tool="kohya_ss v25.2.1", case="the same project, regularisation asked for",
           files=images("img/8_zb cat/a.png", "reg/1_cat/b.png", "model/sample/c.png"),
           captions={"img/8_zb cat/a.png": "zb cat"}, repeats={"img/8_zb cat/a.png": 8},
           regularisation=("reg/1_cat/b.png",), settings={"data.folders.reg.regularisation": True}),
    Layout(tool="LoRA_Easy_Training_Scripts v7", case="concepts in numbered folders and a class folder",
           files={**images("5_hat/a.png", "regularization/b.png"), "5_hat/a.txt": b"a hat"},
           captions={"5_hat/a.png": "a hat"}, repeats={"5_hat/a.png": 5}, said=("aside-folder",)),
    Layout(tool="FluxGym 2024-11", case="images and captions in one folder",
           files={**images("img_0.png"), "img_0.txt": b"zb a cat"}, captions={"img_0.png": "zb a cat"}),
    Layout(tool="WD14 tagger of kohya_ss v25.2.1", case="tags beside sentences",
           files={**images("a.png"), "a.txt": b"1girl, red hat", "a.caption": b"a girl in a hat"},
           captions={"a.png": "1girl, red hat"}, said=("two-captions",), unsaid=()),
    Layout(tool="WD14 tagger of kohya_ss v25.2.1", case="the same caption in two files",
           files={**images("a.png"), "a.txt": b"a cat", "a.caption": b"a cat\n"}, captions={"a.png": "a cat"}),
    # OneTrainer
    Layout(tool="OneTrainer 2025-09", case="masks and captions beside the images",
           files={**images("a.png", "a-masklabel.png"), "a.txt": b"a cat"}, captions={"a.png": "a cat"},
           masks={"a.png": "a-masklabel.png"}, settings={"data.masks": "files"}),
    Layout(tool="OneTrainer 2025-09", case="masks that nobody asked for", files=images("a.png", "a-masklabel.png"),
           captions={"a.png": None}, said=("unused-mask",)),
    Layout(tool="OneTrainer 2025-09", case="condition images", files=images("a.png", "a-condlabel.png"),
           captions={"a.png": None}, said=("control-images",)),
    Layout(tool="OneTrainer 2025-09", case="an image whose name ends in condlabel", files=images("b-condlabel.png"),
           captions={"b-condlabel.png": None}, unsaid=("control-images",)),
    Layout(tool="OneTrainer 2025-09", case="captions from file names", files=images("a_red cat-001.png", "dog (2).png"),
           captions={"a_red cat-001.png": "a red cat", "dog (2).png": "dog"}, settings=NAMES),
    Layout(tool="OneTrainer 2025-09", case="concept folders with subfolders", files={
               **images("cat/front/a.png", "cat/side/b.png"), "cat/side/b.txt": b"a cat"},
           captions={"cat/front/a.png": None, "cat/side/b.png": "a cat"}, said=("subfolder",)),
    # ai-toolkit, SimpleTuner, diffusion-pipe, musubi-tuner, DiffSynth, XLabs
    Layout(tool="ai-toolkit 2025-09", case="captions in .txt", files={**TWO, **texts(a="[trigger] a cat", b="a dog")},
           captions={"a.png": "zb a cat", "b.jpg": "zb, a dog"}, settings={"data.trigger": "zb"}),
    Layout(tool="ai-toolkit 2025-09", case="captions in .json",
           files={**TWO, "a.json": js({"caption": "a cat", "caption_short": "cat"}),
           "b.json": js({"caption": "a dog"})},
           captions=CATDOG),
    Layout(tool="ai-toolkit 2025-09", case="control and mask folders",
           files={**images("data/a.png", "control/a.png", "mask/a.png"), "data/a.txt": b"a cat"},
           captions={"data/a.png": "a cat"}, masks={"data/a.png": "mask/a.png"}, said=("aside-folder",),
           settings={"data.masks": "files"}),
    Layout(tool="SimpleTuner v3.0", case="textfile, several lines",
           files={**images("a.png"), "a.txt": b"a cat\na red cat\n"}, captions={"a.png": "a cat a red cat"}),
    Layout(tool="SimpleTuner v3.0", case="filename strategy", files=images("a_red_cat.png"),
           captions={"a_red_cat.png": "a red cat"}, settings=NAMES),
    Layout(tool="SimpleTuner v3.0", case="nested folders", files=images("set/part/a.png", "set/part/more/b.png"),
           captions={"set/part/a.png": None}, said=("deep-folder",)),
    Layout(tool="SimpleTuner v3.0", case="parquet strategy, the package is missing",
           files={**images("a.png"), "metadata.parquet": b"PAR1"}, error="pip install pyarrow"),
    Layout(tool="diffusion-pipe 2025-09", case="captions.json with lists",
           files={**TWO, "captions.json": js({"a.png": ["a cat", "a red cat"], "b.jpg": ["a dog"]})},
           captions={"a.png": "a cat a red cat", "b.jpg": "a dog"}),
    Layout(tool="diffusion-pipe 2025-09", case="mask folder beside the images", files=images("a.png", "mask/a.png"),
           captions={"a.png": None}, masks={"a.png": "mask/a.png"}, settings={"data.masks": "files"}),
    Layout(tool="musubi-tuner v0.2.12", case="images and control images",
           files={**images("a.png", "control_images/a_0.png", "control_images/a_1.png"), "a.txt": b"a cat"},
           captions={"a.png": "a cat"}, said=("aside-folder",)),
    Layout(tool="musubi-tuner v0.2.12", case="JSONL with paths of another machine",
           files={**images("x/a.png", "x/b.png"), "metadata.jsonl": lines(
               {"image_path": "/data/x/a.png", "caption": "a cat"},
           {"image_path": "D:\\x\\b.png", "caption": "a dog"})},
           captions={"x/a.png": "a cat", "x/b.png": "a dog"}),
    Layout(tool="DiffSynth-Studio v1.1.8", case="metadata.csv with image and prompt",
           files={**TWO, "metadata.csv": b"image,prompt\na.png,a cat\nb.jpg,a dog\n"}, captions=CATDOG),
    Layout(tool="XLabs x-flux 2024-10", case="NAME.json", files={**images("a.png"), "a.json": js({"caption": "a cat"})},
           captions={"a.png": "a cat"}),
    # Hugging Face
    Layout(tool="datasets 4.0 imagefolder", case="metadata.jsonl", files={**TWO, "metadata.jsonl": lines(
               {"file_name": "a.png", "text": "a cat"}, {"file_name": "b.jpg", "text": "a dog"})}, captions=CATDOG),
    Layout(tool="datasets 4.0 imagefolder", case="metadata.csv", files={**TWO, "metadata.csv": CSV_ROWS.encode()},
           captions=CATDOG),
    Layout(tool="datasets 4.0 imagefolder", case="splits with metadata of their own",
           files={**images("train/a.png", "test/a.png"), "train/metadata.csv": b"file_name,text\na.png,a cat\n",
                  "test/metadata.csv": b"file_name,text\na.png,a dog\n"},
           captions={"train/a.png": "a cat", "test/a.png": "a dog"}),
    Layout(tool="datasets 4.0 imagefolder", case="data/train with one table above",
           files={**images("data/train/a.png"), "metadata.csv": b"file_name,text\ndata/train/a.png,a cat\n"},
           captions={"data/train/a.png": "a cat"}),
    Layout(tool="datasets 4.0", case="images inside parquet shards only",
           files={"data/train-00000-of-00001.parquet": b"PAR1"}, error="no images"),
    Layout(tool="diffusers 0.35 train_controlnet", case="conditioning images",
           files={**images("a.png", "conditioning_images/a.png"), "metadata.jsonl": lines(
               {"file_name": "a.png", "conditioning_image": "conditioning_images/a.png", "text": "a cat"})},
           captions={"a.png": "a cat"}, said=("aside-folder",)),
    Layout(tool="diffusers 0.35 train_dreambooth", case="class images inside",
           files=images("a.png", "class_images/0.png"),
           captions={"a.png": None}, said=("aside-folder",)),
    # other trainers
    Layout(tool="EveryDream2 2023-09", case="captions in file names", files=images("a photo of a cat_1.jpg"),
           captions={"a photo of a cat_1.jpg": "a photo of a cat"}, settings=NAMES),
    Layout(tool="EveryDream2 2023-09", case="captions in file names, offered", files=images("a photo of a cat_1.jpg"),
           captions={"a photo of a cat_1.jpg": None}, said=("no-caption",), advice="data.caption_fallback=file_name"),
    Layout(tool="Civitai trainer 2025", case="NAME.EXT.txt", files={**images("a.png"), "a.png.txt": b"a cat"},
           captions={"a.png": "a cat"}),
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
    Layout(tool="img2dataset 1.47", case="webdataset output", files={"00000.tar": b"x"}, error="no images"),
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
    Layout(tool="AUTOMATIC1111 v1.10 outputs", case="parameters, asked for",
           files={"1.png": png_text("1.png", parameters="a red cat\nNegative prompt: dog\nSteps: 20")},
           captions={"1.png": "a red cat"}, settings=INSIDE),
    Layout(tool="AUTOMATIC1111 v1.10 outputs", case="UserComment of a JPEG",
           files={"1.jpg": exif("1.jpg", user_comment)},
           captions={"1.jpg": "a red cat"}, settings=INSIDE),
    Layout(tool="Midjourney 6", case="Description", files={"1.png": png_text("1.png", Description="a red cat")},
           captions={"1.png": "a red cat"}, settings=INSIDE),
    Layout(tool="ComfyUI 0.3.50 outputs", case="a workflow is no caption",
           files={"1.png": png_text("1.png", prompt='{"3": {"class_type": "KSampler"}}', workflow="{}")},
           captions={"1.png": None}, said=("no-caption",), settings=INSIDE),
    Layout(tool="Lightroom 14", case="ImageDescription", files={"1.jpg": exif("1.jpg", image_description)},
           captions={"1.jpg": "a red cat"}, settings=INSIDE),
    Layout(tool="Lightroom 14", case="XMP", files={"1.webp": image("1.webp", xmp=XMP.encode())},
           captions={"1.webp": "a red cat"}, settings=INSIDE),
    # what wins over what, and damage
    Layout(tool="any", case="a caption file comes before a table", files={
               **images("a.png"), "a.txt": b"a cat", "metadata.csv": b"file_name,text\na.png,a dog\n"},
           captions={"a.png": "a cat"}, said=("two-captions",), unsaid=("metadata",)),
    Layout(tool="any", case="a table comes before text inside and names", files={
               "1.png": png_text("1.png", Description="a dog"), "metadata.csv": b"file_name,text\n1.png,a cat\n"},
           captions={"1.png": "a cat"}, settings=INSIDE),
    Layout(tool="any", case="JSON that is none", files={**images("a.png"), "captions.json": b"{"},
           captions={"a.png": None},
           said=("metadata",), unsaid=()),
    Layout(tool="any", case="a table without captions", files={**images("a.png"), "metadata.csv": b"x,y\n1,2\n"},
           captions={"a.png": None}, said=("metadata",), unsaid=()),
    Layout(tool="any", case="an image called captions", files={**images("captions.png"), "captions.txt": b"a cat"},
           captions={"captions.png": "a cat"}),
    Layout(tool="any", case="JSON beside an image, without a caption", files={**PHOTOS, "one.json": js({"width": 3})},
           captions={"one.webp": None, "two.webp": None}, said=("caption-text",)),
)  # fmt: skip
