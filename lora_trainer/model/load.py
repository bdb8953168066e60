"""Where a base model is and what it is: from what the user wrote to a layout on this machine and its facts.

A source is `embedded`, a diffusers folder, a `.safetensors` checkpoint or a Hub id. Torch-free:
everything is decided from configs and safetensors headers. `describe` touches no network; `locate`
may download. What is wrong with a source is said before anything is cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lora_trainer import families
from lora_trainer.config import CHUNK_TOKENS, Auto, BaseSettings
from lora_trainer.errors import InputError, MachineError, RequestError, first_line
from lora_trainer.families.base import BaseFacts, Family, Layout, Part
from lora_trainer.families.folder import AGAIN, read_header
from lora_trainer.files import HashMemo
from lora_trainer.model.hub import cached_snapshot, download

EMBEDDED = "embedded"
EMBEDDED_FOLDER = Path(__file__).resolve().parents[1] / "embedded"
_PICKLES = frozenset({".ckpt", ".pt", ".pth", ".bin", ".pkl"})
_ADAPTER_MARKS = ("lora_down", "lora_up", "lora_A.", "lora_B.", "hada_w1", "lokr_w1", "oft_blocks")


def describe(settings: BaseSettings) -> BaseFacts:
    """Return facts of `settings.model` without downloading: from its files, or by name for well-known ids.

    Raises InputError for what cannot be a base and MachineError for what is not on this machine.
    """
    source = settings.model
    layout, family = _find(settings)
    if layout is not None:
        return _facts(layout, family, source=source)
    facts = families.known_base(family.default_source if family else source)
    if facts is None:
        raise MachineError(
            f"base model {source!r} is not on this machine and not known by name",
            fix="start the training once to download it, or give a local diffusers folder",
        )
    return replace(facts, source=source)


def locate(settings: BaseSettings) -> BaseFacts:
    """Return facts of `settings.model` on this machine, downloading what is missing from the Hub.

    Raises InputError for an unusable source and MachineError when the Hub cannot be reached.
    """
    source = settings.model
    layout, family = _find(settings)
    if layout is not None:
        try:
            return _facts(layout, family, source=source)
        except InputError:
            if not _from_hub(settings):
                raise  # else a download was interrupted: finish it
    layout, family = _find(settings, fetch=True)
    assert layout is not None
    return _facts(layout, family, source=source)


def _facts(layout: Layout, family: Family | None, *, source: str) -> BaseFacts:
    """Return what a base is; raises InputError where its files do not say what their classes need."""
    try:
        family = family or families.detect(layout.folder)
        return family.facts(layout, source=source, identities={})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise InputError(
            f"a config.json of base model {source} lacks something or says it wrongly ({what})",
            fix=AGAIN,
        ) from error


def with_choices(
    facts: BaseFacts, settings: BaseSettings, *, zero_terminal_snr: bool | None
) -> BaseFacts:
    """Return `facts` with what the user knows better than the files; raises RequestError where it cannot be."""
    prediction = facts.prediction if settings.prediction == "auto" else settings.prediction
    zero = facts.zero_terminal_snr if zero_terminal_snr is None else zero_terminal_snr
    if (prediction == "flow") != (facts.prediction == "flow"):
        raise RequestError(
            f"base.prediction={prediction}, but {facts.source} is of family {facts.family}",
            fix="leave base.prediction at auto",
        )
    if prediction == "flow" and zero:
        raise RequestError(
            f"objective.zero_terminal_snr does not apply to {facts.source}: flow matching starts at pure noise",
            fix="leave it at auto",
        )
    if zero and prediction == "epsilon":
        raise RequestError(
            "zero terminal SNR with epsilon prediction: pure noise says nothing about the image",
            fix="use --set base.prediction=v_prediction, or --set objective.zero_terminal_snr=false",
        )
    facts = families.family(facts.family).with_clip_skip(facts, settings.clip_skip)
    return replace(facts, prediction=prediction, zero_terminal_snr=zero)


def with_caption_tokens(facts: BaseFacts, caption_tokens: int | Auto) -> BaseFacts:
    """Return `facts` with texts read in as many chunks as `data.caption_tokens` says; auto: in one."""
    if caption_tokens == "auto" or not families.family(facts.family).reads_chunks:
        return facts
    return replace(facts, chunks=caption_tokens // CHUNK_TOKENS)


def identified(facts: BaseFacts, memo: HashMemo) -> BaseFacts:
    """Return `facts` of a local base with the content hash of each part filled in."""
    files = families.family(facts.family).parts(facts.located)
    identities = {part: _identity(found, memo) for part, found in files.items()}
    parts = {name: replace(part, identity=identities[name]) for name, part in facts.parts.items()}
    return replace(facts, parts=parts)


def base_files(facts: BaseFacts) -> Mapping[str, tuple[Path, ...]]:
    """Return the files of each part of a base that is on this machine."""
    return families.family(facts.family).parts(facts.located)


def _identity(files: tuple[Path, ...], memo: HashMemo) -> str:
    joined = "\n".join(f"{path.name} {memo.sha256(path)}" for path in files)
    return hashlib.sha256(joined.encode()).hexdigest()


def _find(settings: BaseSettings, *, fetch: bool = False) -> tuple[Layout | None, Family | None]:
    """Return the layout (None: not on this machine) and the family where a header tells it."""
    source = settings.model
    path = Path(source).expanduser()
    if path.suffix == ".safetensors" or (path.is_file() and path.suffix not in _PICKLES):
        return _find_file(settings, path, fetch=fetch)
    folder = _folder(source, revision=settings.revision, fetch=fetch)
    if folder is None:
        return None, None
    if settings.vae is None:
        return Layout(folder=folder), None
    family = families.detect(folder)
    return Layout(folder=folder, files={"vae": _find_vae(settings, family, fetch=fetch)}), family


def _find_file(settings: BaseSettings, file: Path, *, fetch: bool) -> tuple[Layout | None, Family]:
    family, parts = _recognised(file)
    files: dict[Part, Path] = dict.fromkeys(parts, file)
    if settings.vae is not None:
        files["vae"] = _find_vae(settings, family, fetch=fetch)
    companion = family.default_source if settings.companion == "auto" else settings.companion
    folder = _folder(companion, revision=None, fetch=fetch, without=frozenset(files))
    if folder is None:
        return None, family
    found = families.detect(folder)
    if found is not family:
        raise InputError(
            f"base.companion {companion} is of family {found.name}, {file.name} is {family.name}",
            fix=f"name a {family.name} folder, or leave base.companion at auto",
        )
    return Layout(folder=folder, files=files), family


def _recognised(file: Path) -> tuple[Family, frozenset[Part]]:
    """Return family and parts of a checkpoint file; raises InputError saying what it is instead."""
    if not file.is_file():
        raise InputError(
            f"base model {file} does not exist",
            fix="give an existing file or folder, a Hub id (owner/name) or `embedded`",
        )
    if file.suffix != ".safetensors":
        raise InputError(
            f"base model {file.name} is no .safetensors file",
            fix="give a .safetensors checkpoint, a diffusers folder or a Hub id",
        )
    header = read_header(file)
    found = families.detect_file(header)
    if found is not None:
        return found
    if any(mark in name for name in header for mark in _ADAPTER_MARKS):
        raise InputError(
            f"{file.name} is a LoRA, not a base model",
            fix="give the base model it was made for; to go on training it use --set train.init_from=FILE",
        )
    first = next(iter(sorted(header)), "no tensor")
    raise InputError(
        f"{file.name} holds {len(header):,} tensors such as {first!r}: no checkpoint of a supported "
        f"family ({', '.join(families.MODULES)})",
        fix="give a text-to-image checkpoint of one of these (no inpainting, refiner or part alone)",
    )


def _find_vae(settings: BaseSettings, family: Family, *, fetch: bool) -> Path:
    """Return the file or folder of `base.vae`; raises InputError when it holds no VAE for the family."""
    assert settings.vae is not None
    path = Path(settings.vae).expanduser()
    if path.is_file() and path.suffix == ".safetensors":
        if "vae" not in family.detect_file(read_header(path)):
            raise InputError(
                f"base.vae {path.name} holds no VAE of family {family.name}",
                fix="give a VAE made for this base, or leave base.vae out",
            )
        return path
    folder = _folder(settings.vae, revision=None, fetch=fetch)
    if folder is None:
        raise MachineError(
            f"base.vae {settings.vae} is not on this machine",
            fix="start the training once to download it, or give a local file",
        )
    inside = folder / "vae" if (folder / "vae" / "config.json").is_file() else folder
    if not (inside / "config.json").is_file():
        raise InputError(
            f"base.vae {settings.vae} has no config.json", fix="give a VAE folder or file"
        )
    return inside


def _folder(
    source: str, *, revision: str | None, fetch: bool, without: frozenset[Part] = frozenset()
) -> Path | None:
    """Return the local folder of a source, downloading it where `fetch` asks for it."""
    if source == EMBEDDED:
        return EMBEDDED_FOLDER
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.suffix in _PICKLES:
        raise InputError(
            f"base model {path.name} is a pickle, which can run code when opened",
            fix="give the safetensors version",
        )
    if _is_path(source):
        raise InputError(
            f"base model {source!r} does not exist",
            fix="give an existing file or folder, a Hub id (owner/name) or `embedded`",
        )
    if fetch:
        return download(source, revision=revision, without=without)
    return cached_snapshot(source, revision=revision)


def _is_path(source: str) -> bool:
    path = Path(source).expanduser()
    return path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1


def _from_hub(settings: BaseSettings) -> bool:
    """Say whether anything of this base may come from the Hub."""
    named = [settings.model, settings.vae, settings.companion]
    return any(
        name is not None and name != EMBEDDED and not Path(name).expanduser().exists()
        for name in named
    )
