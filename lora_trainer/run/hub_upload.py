"""Uploading a finished adapter to the Hugging Face Hub: the file, its sample images and a model card.

Input is the file in its run folder, output the repository's address. Nothing else of a run leaves the machine: no
state, no record, no folder name, no token. A failed upload never fails a training.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Template
from PIL import Image

from lora_trainer import families
from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.wording import public_text
from lora_trainer.lora_file.base_layers import check_usable
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.key_formats import key_format
from lora_trainer.lora_file.metadata import header_settings, steps_trained, tells_of_dataset
from lora_trainer.reporting.run_record import read
from lora_trainer.reporting.sample_files import SAMPLES, own_samples, sample_prompt

if TYPE_CHECKING:
    from lora_trainer.lora_file.read import Contents

CARD = "README.md"
# `template:sd-lora` makes the Hub show the images as a gallery and offer to run the adapter.
TAGS = ("text-to-image", "diffusers", "lora", "template:sd-lora")
LOGIN = "run `hf auth login`, or set HF_TOKEN"
# Said where the Hub knows the token and refuses to write; the interface recognises it by these words.
WRITE_REFUSED = "the token may only read, or not write there"
_WRITING_LOGIN = (
    f"make a token that may write on https://huggingface.co/settings/tokens, then {LOGIN}"
)
_REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)


def is_repository(name: str) -> bool:
    """Return whether a repository of the Hub can have this name, owner/name."""
    return _REPOSITORY.fullmatch(name) is not None


def check_upload(repository: str, *, asked_by: str = "--set output.hub_repo") -> None:
    """Refuse before training an upload that could not be done after it; `asked_by` is the option.

    Raises RequestError for a name that no repository can have, MachineError where nobody is logged in.
    """
    from huggingface_hub import get_token

    if not is_repository(repository):
        raise RequestError(
            f"{repository!r} is not a repository; allowed is owner/name, of letters, digits, ._-",
            fix=f"write it as {asked_by}=owner/name",
        )
    if get_token() is None:
        raise MachineError(f"{repository} needs a login to the Hugging Face Hub", fix=LOGIN)


def push(
    file: Path, *, repository: str, private: bool, asked_by: str = "--set output.hub_repo"
) -> str:
    """Upload a LoRA file and return the repository's address; a model card that lies there is left alone.

    Raises InputError for a file that is not a LoRA of a known family, errors as `check_upload`, and MachineError
    for the rest.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # re-exported

    contents, fit = check_usable(file, names=None)
    check_upload(repository, asked_by=asked_by)
    samples = own_samples(file.parent / SAMPLES, up_to=steps_trained(contents.metadata))
    words = embedding_path(file)
    embedding = words if words.is_file() else None
    api, contents_by_name = HfApi(), dict[str, Path | bytes]({file.name: file})
    if embedding is not None:
        contents_by_name[f"{embedding.parent.name}/{embedding.name}"] = embedding
    contents_by_name |= shared_samples(samples, contents.metadata)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if not api.file_exists(repository, CARD):
            card = _model_card(
                file, contents, fit.family, repository, samples=samples, embedding=embedding
            )
            contents_by_name[CARD] = card.encode()
        additions = [
            CommitOperationAdd(
                path_in_repo=name,
                # Read at once: an open file could not be replaced on Windows while it is uploaded.
                path_or_fileobj=content if isinstance(content, bytes) else content.read_bytes(),
            )
            for name, content in contents_by_name.items()
        ]
        api.create_commit(repository, additions, commit_message=f"Upload {file.name}")
    except HfHubHTTPError as error:
        status = error.response.status_code
        fix = {401: LOGIN, 403: _WRITING_LOGIN}.get(status)
        refused = f": {WRITE_REFUSED}" if status == 403 else ""
        reason = f"{refused} (the Hub answers {status})"
    except (HTTPError, OSError, ValueError) as error:  # ValueError: the Hub refuses the card
        fix, reason = None, f" ({type(error).__name__})"
    else:
        return f"{constants.ENDPOINT}/{repository}"
    raise MachineError(
        f"{file.name} was not uploaded to {repository}{reason}",
        fix=fix or f"try again with `hf upload {repository} {file}`",
    )


def shared_samples(samples: Sequence[Path], metadata: Mapping[str, str]) -> dict[str, Path | bytes]:
    """Return sample images as others get them, by their names there; `metadata` is the header of the LoRA.

    An image has its prompt in it only where the header may tell of the dataset: prompts are taken from captions.
    """
    tells = tells_of_dataset(metadata)
    return {
        _sample_name(index): image if tells else _pixels_alone(image)
        for index, image in enumerate(samples)
    }


def _pixels_alone(image: Path) -> bytes:
    """Return a sample image as PNG without the texts in it, among which is its prompt."""
    data = io.BytesIO()
    with Image.open(image) as opened:
        Image.frombytes("RGB", opened.size, opened.convert("RGB").tobytes()).save(data, "PNG")
    return data.getvalue()


def _sample_name(index: int) -> str:
    return f"samples/{index:02d}.png"


def _drawn(texts: Mapping[str, str], family: str) -> dict[str, float]:
    """Return the pipeline's arguments for the steps and guidance of the sample images, {} where no header has them."""
    settings, traits = header_settings(texts), families.family(family).pipeline
    steps, scale = (settings.get(f"sampling.{key}") for key in ("steps", "guidance_scale"))
    if not isinstance(steps, int) or not isinstance(scale, int | float):
        return {}
    return {"num_inference_steps": steps, traits.scale_argument: scale - traits.scale_offset}


def _blocks(texts: Mapping[str, str], family: str, base: str | None) -> dict[str, Any] | None:
    """Return how the blocks of a modular pipeline draw as the sample images, None for a plain pipeline."""
    kind = families.family(family)
    if (blocks := kind.pipeline.blocks) is None:
        return None
    known = kind.releases.get(base or "")
    release = known.release if known else kind.published[0]
    drawn = _drawn(texts, family)
    guided = kind.pipeline.guidance(release.architecture, release.distilled).two_passes
    return {
        "class_name": blocks.of(release.architecture),
        "unused": blocks.unused,
        "steps": drawn.get("num_inference_steps"),
        # Without guidance the blocks of some bases have no component for it.
        "scale": drawn.get(kind.pipeline.scale_argument) if guided else None,
    }


def _system_prompt(texts: Mapping[str, str], family: str) -> tuple[str, dict[str, str]]:
    """Return what the system prompt of the training puts before a prompt, and the pipeline's argument if it differs."""
    prompt, kind = header_settings(texts).get("base.system_prompt"), families.family(family)
    if not isinstance(prompt, str) or kind.text.system_prompt is None:
        return "", {}
    is_other = prompt not in ("auto", kind.text.system_prompt)
    argument = {kind.pipeline.system_argument: prompt} if is_other else {}
    return kind.text.before_prompts(
        kind.text.system_prompt if prompt == "auto" else prompt
    ), argument


def _model_card(
    file: Path,
    contents: Contents,
    family: str,
    repository: str,
    *,
    samples: Sequence[Path],
    embedding: Path | None,
) -> str:
    """Return the model card: YAML that the Hub reads, the gallery, the trigger, how to use the file.

    It knows whether `load_lora_weights` gives the trained adapter and whether ComfyUI and its like read the file,
    and links the base only by its Hub id, as a path would say whose machine it was.
    """
    from huggingface_hub import ModelCardData

    kinds = {part.kind for part in contents.parts.values() if part.kind is not None}
    dora = any("magnitude" in part.entries for part in contents.parts.values())
    format, texts = key_format(contents.parts), contents.metadata
    # As the run's record names it, else as the header does; it may be a path.
    try:
        source = read(file.parent).base.source
    except RequestError:  # a file that lies elsewhere
        source = ""
    if not source:
        source = texts.get("ss_sd_model_name", "")
    base = source if is_repository(source) and not Path(source).exists() else None
    trigger = texts.get("modelspec.trigger_phrase") or None
    # Prompts are taken from captions where the run has none of its own.
    tells = tells_of_dataset(texts)
    prompts = [sample_prompt(image) if tells else trigger or "" for image in samples]
    data = ModelCardData(
        tags=list(TAGS),
        library_name="diffusers",
        base_model=base,
        base_model_relation="adapter" if base else None,
        instance_prompt=trigger,
        license=texts.get("modelspec.license") or None,
        widget=[
            {"text": public_text(prompt) or "-", "output": {"url": _sample_name(index)}}
            for index, prompt in enumerate(prompts)
        ]
        or None,
    )
    before_prompts, system_argument = _system_prompt(texts, family)
    template = Template(
        Path(__file__).with_name("model_card.md").read_text(encoding="utf-8"),
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return str(
        template.render(
            yaml=data.to_yaml(),
            title=texts.get("modelspec.title") or file.stem,
            description=public_text(texts.get("modelspec.description", "")),
            trigger=trigger,
            prompt=public_text(prompts[0] if prompts else trigger or ""),
            drawn=_drawn(texts, family),
            before_prompts=public_text(before_prompts).strip(),
            system_argument=system_argument,
            blocks=_blocks(texts, family, base),
            base=base,
            base_name=Path(source).name or family,
            repository=repository,
            file=file,
            embedding=embedding,
            samples=samples,
            in_diffusers=kinds == {"lora"} and (format == "diffusers" or not dora),
            in_programs=format != "diffusers"
            or format == families.family(family).formats.written[0],
            python=partial(json.dumps, ensure_ascii=False),
        )
    )
