"""The base models that a page offers: the built-in one, those of the Hub's cache, all public releases.

Input: the Hub's cache folder; the releases that the families know, which a warm process tells. Output:
choices and cards as plain values; any other Hub id or path can be typed beside them.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from lora_trainer.common.wording import bytes_text

Choice = tuple[str, str]
Card = dict[str, Any]
_PIPELINE_FILE = "model_index.json"


def choices() -> list[Choice]:
    """Return what can be chosen, the automatic choice first."""
    return [
        ("chosen for this machine", "auto"),
        ("embedded miniature, to try things out", "embedded"),
        *(
            (f"{source}, {bytes_text(size)} on this machine", source)
            for source, size in sorted(_downloaded().items())
        ),
    ]


def cards(released: list[Card]) -> list[Card]:
    """Return the cards of the releases: name, owner, what there is to download."""
    here = _downloaded()
    found = [
        {
            "source": row["source"],
            "name": str(row["source"]).rpartition("/")[2].replace("-", " "),
            "owner": str(row["source"]).partition("/")[0],
            "said": f"{bytes_text(here[row['source']])}, on this machine"
            if row["source"] in here
            else f"{bytes_text(row['download_bytes'])} to download",
            "here": row["source"] in here,
            "resolution_px": row["resolution_px"],
        }
        for row in released
    ]
    return sorted(found, key=lambda card: not card["here"])


def releases() -> list[Card]:
    """Return the public releases that are computed in ways of their own; for the warm process alone.

    Importing the families takes a second.
    """
    from lora_trainer.families import MODULES, family

    rows: list[Card] = []
    seen: list[Any] = []
    for name in MODULES:
        for source, facts in family(name).releases.items():
            if facts.architecture in seen:
                continue
            seen.append(facts.architecture)
            rows.append(
                {
                    "source": source,
                    "download_bytes": facts.download_bytes,
                    "resolution_px": facts.resolution_px,
                }
            )
    return rows


def _downloaded() -> dict[str, int]:
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
