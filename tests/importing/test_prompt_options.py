"""Options behind sample prompts become settings, or what becomes of them is said; none is cut off in silence."""

from __future__ import annotations

import json

from lora_trainer.importing import reading
from lora_trainer.importing.prompt_options import parted

TAB = {
    "LoRA_type": "Standard", "full_path": True, "num_cpu_threads_per_process": 2,
    "pretrained_model_name_or_path": "a.safetensors", "network_dim": 8,
}  # fmt: skip


def test_a_prompt_is_parted_from_its_options() -> None:
    line = "a cat, in a hat --n low quality, blurry --w 512 --h 768 --d -1 --l 7.5 --s 28"
    text, options = parted(line)
    assert text == "a cat, in a hat"
    assert options == {
        "n": "low quality, blurry", "w": "512", "h": "768", "d": "-1", "l": "7.5", "s": "28",
    }  # fmt: skip
    assert parted("well--known, -- a dash --x") == ("well--known, -- a dash --x", {})


def test_options_become_settings_and_what_differs_is_said() -> None:
    lines = [
        "# prompts",
        "a cat --n blurry --w 512 --d 7 --l 6 --s 20",
        "a dog --d 9 --ss euler",
        "",
    ]
    tab = {**TAB, "sample_prompts": "\n".join(lines)}
    imported = reading.import_bytes(json.dumps(tab).encode(), "tab.json")
    found = {key: value for key, value in imported.settings.items() if key.startswith("sampling.")}
    assert found == {
        "sampling.prompts": ["a cat", "a dog"], "sampling.negative_prompt": "blurry",
        "sampling.seed": 7, "sampling.guidance_scale": 6, "sampling.steps": 20,
    }  # fmt: skip
    said = imported.nearest["sample_prompts"]
    for part in ("--n of the first", "the next prompt adds 1", "size of the training", "--ss"):
        assert part in said
