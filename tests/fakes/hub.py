"""Folders that hold exactly the files of the real releases, for a Hub to offer.

tests/fakes/hub_files.json lists them: `read` is what loading a release needs, `left` the rest of what is
there, each with where the list was found. A folder is made from a family's tiny base; files to be left
hold no model, so that one that is fetched shows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.fakes.hub_server import HubServer

_STEMS = {"model", "diffusion_pytorch_model"}


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


LISTS: Mapping[str, Mapping[str, Any]] = read_json(Path(__file__).with_name("hub_files.json"))


def publish(hub: HubServer, source: str, base: Path, *, name: str | None = None) -> None:
    """Offer a tiny base with the files of a release, under its id or another name."""
    name = name or source
    folder = base.with_name(f"{base.name} as released") / name
    hub.folders[name] = as_released(
        base, folder, read=LISTS[source]["read"], left=LISTS[source]["left"]
    )


def as_released(base: Path, folder: Path, *, read: Sequence[str], left: Iterable[str]) -> Path:
    """Write a tiny base again with exactly these files, and return the folder."""
    for name in (*read, *left):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in left:
        (folder / name).write_bytes(b"not to be fetched")
    for name in read:
        if not name.endswith(".safetensors") and not _is_index(name):
            _write_text(base, folder, name, read=read)
    for part in {name.partition("/")[0] for name in read if name.endswith(".safetensors")}:
        shards = [name for name in read if name.startswith(f"{part}/") and "safetensors" in name]
        _write_weights(base / part, folder, [name for name in shards if not _is_index(name)])
    return folder


def _is_index(name: str) -> bool:
    return name.endswith(".safetensors.index.json")


def _write_weights(part: Path, folder: Path, names: Sequence[str]) -> None:
    (file,) = [path for path in part.glob("*.safetensors") if path.stem in _STEMS]
    tensors, where = load_file(file), {}
    for number, name in enumerate(names):
        own = sorted(tensors)[number :: len(names)]
        save_file({key: tensors[key] for key in own}, folder / name, {"format": "pt"})
        where |= dict.fromkeys(own, Path(name).name)
    if len(names) > 1:
        index = {"metadata": {"total_size": 1}, "weight_map": where}
        path = folder / part.name / f"{file.stem}.safetensors.index.json"
        path.write_text(json.dumps(index))


def _write_text(base: Path, folder: Path, name: str, *, read: Sequence[str]) -> None:
    target, source = folder / name, base / name
    place = source.parent
    match target.name:
        case "generation_config.json":
            target.write_text("{}")
        case "chat_template.jinja" if not source.is_file():  # Qwen-Image reads none of it
            target.write_text("{{ messages[0].content }}")
        case "vocab.json":
            target.write_text(json.dumps(_tokenizer(place)["model"]["vocab"]))
        case "merges.txt":
            pairs = _tokenizer(place)["model"]["merges"]
            target.write_text("#version: 0.2\n" + "\n".join(map(" ".join, pairs)) + "\n")
        case "added_tokens.json":
            added = _tokenizer(place)["added_tokens"]
            target.write_text(json.dumps({token["content"]: token["id"] for token in added}))
        case "special_tokens_map.json":
            settings = read_json(place / "tokenizer_config.json")
            named = {key: value for key, value in settings.items() if key.endswith("_token")}
            target.write_text(json.dumps(named))
        case "tokenizer_config.json":
            target.write_text(json.dumps(_settings(place, own_file=_template(name) in read)))
        case "spiece.model":
            target.write_bytes(spiece(_tokenizer(place)["model"]["vocab"]))
        case _:
            shutil.copyfile(source, target)


def _tokenizer(place: Path) -> Any:
    return read_json(place / "tokenizer.json")


def _template(name: str) -> str:
    return name.rpartition("/")[0] + "/chat_template.jinja"


def _settings(place: Path, *, own_file: bool) -> dict[str, Any]:
    """Return a tokenizer's settings, with its chat template where the release has no file for it."""
    found, template = read_json(place / "tokenizer_config.json"), place / "chat_template.jinja"
    if template.is_file() and not own_file:
        found["chat_template"] = template.read_text(encoding="utf-8")
    return found


def spiece(pieces: Sequence[tuple[str, float]]) -> bytes:
    """Return SentencePiece's own file of a T5 vocabulary, written by the message classes of transformers."""
    from transformers.utils import sentencepiece_model_pb2_new as messages

    model = messages.ModelProto()
    for number, (text, score) in enumerate(pieces):
        kind = {0: 3, 1: 3, 2: 2}.get(number, 1)  # control, control, unknown, normal
        model.pieces.add(piece=text, score=score, type=kind)
    model.trainer_spec.unk_id = 2
    model.trainer_spec.model_type = 1
    model.normalizer_spec.name = "identity"
    written: bytes = model.SerializeToString()
    return written
