"""The base models that a page offers: the built-in one, those of the Hub's cache, all public releases.

Input: the Hub's cache folder; the releases that the families know, which the process of the plans tells. Output:
choices and facts as plain values; any other Hub id or path can be typed beside them. A token of the Hub is
handed to the Hub's own library, which keeps it.
"""

from __future__ import annotations

import os
import re
from typing import Any

from huggingface_hub import get_token, login, scan_cache_dir, whoami
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is re-exported
    CacheNotFound,
    HfHubHTTPError,
    HTTPError,
)

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.wording import bytes_text
from lora_trainer.config.inputs import EMBEDDED, EMBEDDED_EDIT

from .server.translation import Words

Choice = tuple[str, str]
Card = dict[str, Any]
_TOKEN = re.compile(r"hf_[A-Za-z0-9_]{8,200}")
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# The release that is `offered` first in its family.toml.
RECOMMENDED = "stabilityai/stable-diffusion-xl-base-1.0"
# Of those that edit the one that is `offered` first.
RECOMMENDED_FOR_PAIRS = "black-forest-labs/FLUX.2-klein-base-4B"
_LAST = 1000  # of a release that is seldom used
_PIPELINE_FILE = "model_index.json"


def choices(said: Words) -> list[Choice]:
    """Return what can be typed for a base, each with what it is, the automatic choice first."""
    return [
        ("auto", said("automatic")),
        (EMBEDDED, said("miniature, to try things out")),
        (EMBEDDED_EDIT, said("miniature that edits, for pairs of images")),
        *(
            (source, said("{#}, on this machine", bytes_text(size)))
            for source, size in sorted(downloaded().items())
        ),
    ]


def releases() -> list[Card]:
    """Return the public releases that have a place of their own; asked of the process of the plans alone.

    These are those that are computed in ways of their own, and of others those that their family.toml offers. Importing
    the families takes a second.
    """
    from lora_trainer.families import NAMES, family
    from lora_trainer.families.base.tables import family_table

    rows: list[Card] = []
    seen: list[Any] = []
    for name in NAMES:
        for release, shown in zip(
            family(name).published, family_table(name)["releases"], strict=True
        ):
            source, licence = release.ids[0], release.licence
            edits = family(name).releases[source].references is not None
            if (release.architecture, edits) in seen and "offered" not in shown:
                continue
            seen.append((release.architecture, edits))
            rows.append(
                {
                    "source": source,
                    "family": name,
                    "subjects": shown.get("subjects", []),
                    "good_for": shown.get("good_for", ""),
                    "offered": shown.get("offered", _LAST),
                    "licence": licence.name if licence else "",
                    "allows": licence.allows if licence else "",
                    "companies": licence.companies if licence else "",
                    "gated": licence.is_gated if licence else False,
                    "download_bytes": release.download_bytes,
                    "resolution_px": family(name).releases[source].resolution_px,
                    "edits": edits,
                    "checkpoints": ", ".join(release.checkpoints),
                }
            )
    return rows


def signed_in() -> bool:
    """Return whether the Hub's own files or environment on this machine have a token."""
    return get_token() is not None


def sign_in(token: str) -> str:
    """Give a token to the Hub's own files and return whose it is; raises RequestError or MachineError.

    Neither a message nor a file of this program has the token.
    """
    word = token.strip()
    if not _TOKEN.fullmatch(word):
        raise RequestError(
            "this is not a token of Hugging Face", fix="copy the whole token, which begins with hf_"
        )
    if any(os.environ.get(name) not in (None, "", word) for name in _TOKEN_VARIABLES):
        raise RequestError(
            "the environment variable HF_TOKEN holds another token, which counts before this one",
            fix="start the program again without HF_TOKEN, then sign in",
        )
    try:
        login(token=word, add_to_git_credential=False)
        return str(whoami(word)["name"])
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise RequestError(
                "the Hub does not know this token", fix="make a new one on its page of tokens"
            ) from None
        raise _unreached(error) from None
    except (HTTPError, OSError, ValueError, LookupError) as error:
        raise _unreached(error) from None


def _unreached(error: Exception) -> MachineError:
    return MachineError(
        f"the Hub could not be asked ({type(error).__name__})",
        fix="check the connection, then try again",
    )


def downloaded() -> dict[str, int]:
    """Return the base models in the Hub's cache with their bytes."""
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return {}
    return {
        repo.repo_id: repo.size_on_disk
        for repo in cache.repos
        if repo.repo_type == "model"
        and any(file.file_name == _PIPELINE_FILE for rev in repo.revisions for file in rev.files)
    }
