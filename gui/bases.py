"""The base models a page can offer without a download: what the Hub's cache on this machine holds.

Input: the Hub's cache folder. Output: (label, value) of each choice; any other Hub id or path can be
typed beside them.
"""

from __future__ import annotations

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from lora_trainer.common.wording import bytes_text

Choice = tuple[str, str]
_PIPELINE_FILE = "model_index.json"


def choices() -> list[Choice]:
    """Return what can be chosen, the automatic choice first."""
    return [
        ("chosen for this machine", "auto"),
        ("embedded miniature, to try things out", "embedded"),
        *_downloaded(),
    ]


def _downloaded() -> list[Choice]:
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    found = [
        (f"{repo.repo_id}, {bytes_text(repo.size_on_disk)} on this machine", repo.repo_id)
        for repo in cache.repos
        if repo.repo_type == "model"
        and any(file.file_name == _PIPELINE_FILE for rev in repo.revisions for file in rev.files)
    ]
    return sorted(found)
