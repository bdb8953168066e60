"""A LoRA seen in ComfyUI: copied to where ComfyUI looks for it, then drawn there without and with it.

Inputs: a file of the library, the folder of ComfyUI and its address. Outputs: a job of `lora-train comfyui` with its
pictures in `<runs>/.gui/tries/ID/`, and how far it is. Folder and address are remembered.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.tools.comfyui.draw import NO_EFFECT, STRENGTHS, all_the_same, picture_name
from lora_trainer.tools.comfyui.server import ComfyUI

from .. import command_lines, jobs, sharing
from ..lora_files import LoraFile
from ..markup import plain
from ..media import TRIES, try_url
from ..server.translation import Words
from ..workplace import Workplace

KIND = "comfyui"
_LABELS = {0.0: "without the LoRA", 1.0: "with the LoRA"}


def start(work: Workplace, file: LoraFile, *, folder: str, address: str, prompt: str) -> jobs.Job:
    """Copy a file to ComfyUI and draw with it there; an empty prompt stands for that of the workflow.

    Raises InputError for a folder that is not of LoRAs or an address that may not be asked, RequestError for what is
    not an address and while ComfyUI draws with this file already.
    """
    server = ComfyUI(address)
    if work.roots is not None and not _is_here(server.host):
        raise InputError(
            f"{server.address} is on another machine than this server",
            fix="use 127.0.0.1, as people far away must not reach other machines through this one",
        )
    if any(job.state == "running" for job in of_file(work, file)):
        raise RequestError("ComfyUI draws with this LoRA already", fix="wait for it")
    copied = sharing.copy_to_program(work, file, folder, address=server.address).files[0]
    name = f"{time.time_ns():x}"
    output = work.own / TRIES / name
    argv = [*command_lines.TRAINER, "comfyui", str(copied), f"--server={server.address}"]
    argv += [f"--output={output}", *(f"--strength={value:g}" for value in STRENGTHS)]
    argv += [f"--prompt={prompt.strip()}"] if prompt.strip() else []
    about = {"file": file.ref, "folder": name, "stem": copied.stem}
    return jobs.start(work, kind=KIND, argv=argv, about=about)


def of_file(work: Workplace, file: LoraFile) -> list[jobs.Job]:
    """Return the drawings of a file by ComfyUI, the newest first."""
    return [job for job in jobs.find(work, kind=KIND) if file.was(job.about.get("file"))]


def shown(work: Workplace, file: LoraFile, _: Words) -> Mapping[str, Any]:
    """Return how far the newest drawing is, with its pictures."""
    found = of_file(work, file)
    if not found:
        return {"state": "none"}
    job = found[0]
    folder = Path(str(job.about.get("folder"))).name
    names = {value: picture_name(str(job.about.get("stem")), value) for value in STRENGTHS}
    files = {value: work.own / TRIES / folder / name for value, name in names.items()}
    there = {value: path for value, path in files.items() if path.is_file()}
    no_effect = job.state == "finished" and all_the_same(list(there.values()))
    return {
        "state": job.state,
        "said": _.message(plain(NO_EFFECT if no_effect else job.error())),
        "pictures": [
            {"label": _(_LABELS[value]), "url": try_url(folder, path.name)}
            for value, path in there.items()
        ],
    }


def _is_here(host: str) -> bool:
    """Return whether a host is this machine, without asking a name server."""
    if host.casefold() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return False
