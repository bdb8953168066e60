"""What is fetched from the Hub, and what is said when it cannot be: with a Hub that answers from memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lora_trainer.families.hub_files import wanted
from tests.fakes.hub_server import hub_server


def test_parts_that_a_checkpoint_brings_are_not_fetched() -> None:
    names = [
        *(
            f"{part}/{file}"
            for part in ("text_encoder", "text_encoder_2")
            for file in ("config.json", "model.safetensors")
        ),
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "unet/diffusion_pytorch_model.fp16.safetensors",
    ]
    assert wanted(names, without=frozenset()) == sorted(names)
    texts = ["text_encoder/config.json", "text_encoder_2/config.json", names[5]]
    assert wanted(names, without=frozenset({"denoiser", "text encoders"})) == texts
    assert wanted(names, without=frozenset({"text_encoder"})) == sorted({*names} - {names[1]})


_DOWNLOADS = """
import json
import huggingface_hub
from functools import partial
from lora_trainer.families.hub_files import fetch, wanted

huggingface_hub.hf_hub_download("owner/name", "unet/config.json")
for _ in range(2):
    told = []
    folder = fetch(
        "owner/name", revision=None, choose=partial(wanted, without=frozenset()), model_kind="model",
        instead="", on_bytes=lambda *row: told.append(row),
    )
    print(json.dumps([str(folder), told]))
"""


def test_a_download_is_counted_in_bytes_of_the_files_that_are_missing(tmp_path: Path) -> None:
    """By the Hub's own library, from a server: one of the files is here already."""
    sizes = {"model_index.json": 20, "vae/config.json": 30, "unet/config.json": 40}
    weights = {"vae/diffusion_pytorch_model.safetensors": 15_000_000, "left_out.ckpt": 7}
    for name, size in (sizes | weights).items():
        (tmp_path / "offered" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "offered" / name).write_bytes(b"%c" % len(name) * size)
    with hub_server() as hub:
        hub.folders["owner/name"] = tmp_path / "offered"
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        child = subprocess.run(
            [sys.executable, "-c", _DOWNLOADS], env=environment, capture_output=True, text=True
        )
    assert child.returncode == 0, child.stderr
    (folder, told), (_, again) = map(json.loads, child.stdout.splitlines())
    counts = [here_bytes for _, here_bytes, _ in told]
    assert {(source, all_bytes) for source, _, all_bytes in told} == {("owner/name", 15_000_050)}
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 15_000_050)
    assert len(set(counts)) > 3
    assert (Path(folder) / "vae" / "config.json").is_file()
    assert not (Path(folder) / "left_out.ckpt").exists()
    assert again == [], "all is here"
