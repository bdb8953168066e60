"""Options behind sample prompts come along, or are named; none is cut off in silence."""

from __future__ import annotations

import json

from lora_trainer.importing import reading

TAB = {
    "LoRA_type": "Standard", "full_path": True, "num_cpu_threads_per_process": 2,
    "pretrained_model_name_or_path": "a.safetensors", "network_dim": 8,
}  # fmt: skip


def test_options_come_along_and_what_is_left_out_is_said() -> None:
    lines = [
        "# prompts",
        "a cat --n blurry --w 512 --d 7 --l 6 --s 20",
        "a dog --d 9 --ss euler --s 5000",
        "plain",
        "",
    ]
    tab = {**TAB, "sample_prompts": "\n".join(lines)}
    imported = reading.import_bytes(json.dumps(tab).encode(), "tab.json")
    found = {key: value for key, value in imported.settings.items() if key.startswith("sampling.")}
    assert found == {"sampling.prompts": [lines[1], "a dog --d 9", "plain"]}
    assert imported.nearest["sample_prompts"] == "without --ss, --s 5000"
