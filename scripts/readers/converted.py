"""Whether ComfyUI makes the same of others' files and of what `convert` writes for them.

`python -m scripts.readers.converted --checkout DIR --commit SHA [--family NAME]` builds every file of the corpus
in tests/lora_files with two layers of each part in the releases' sizes, converts it into every format and
compares, for a layer of each kind, the update that ComfyUI's own code makes of both files with the one by the
formula of the kind. Relative differences in Frobenius norm, computed in float64 from fp32 files.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import LoraTrainError
from lora_trainer.tools.adapters import AdapterTarget, convert
from scripts.readers.cases import TOLERANCE, arguments
from scripts.readers.comfyui import CLASSES, TEXTS, UNUSED, model_of
from scripts.readers.networks import base_of
from scripts.readers.stand_ins import stand_in
from scripts.readers.trees import Tree, clip_name
from tests.lora_files.trainers import CASES, Case, Expected, build, some

SIZES: Mapping[str, Mapping[str, int]] = {
    "flux": {"depth": 19, "depth_single_blocks": 38, "hidden_size": 3072},
    "chroma": {"depth": 19, "depth_single_blocks": 38, "hidden_size": 3072},
    "flux2": {"depth": 8, "depth_single_blocks": 48, "hidden_size": 3072},
    "sd3": {"depth": 24},
    "zimage": {"n_layers": 30, "n_refiner_layers": 2, "dim": 3840},
}
"""What ComfyUI's tables of names go by, as in the releases."""
LARGE = {"sd3": {"depth": 38}, "flux2": {"hidden_size": 4096}}
"""What is other in a second release, SD 3.5 Large and klein 9B, by whose widths its files are known."""
LARGE_WIDTHS = {"sd3": 2432, "flux2": 4096}
LAYERS = 32
"""Of the largest CLIP."""


class Names:
    """ComfyUI's own table of what keys of files mean for one family."""

    def __init__(self, family: str, **sizes: int) -> None:
        import comfy.lora

        logging.getLogger().setLevel(logging.WARNING)
        base = base_of(family)
        model = model_of(base)
        model.model_config.unet_config.update({**SIZES.get(family, {}), **sizes})
        self.family = family
        self.table: dict[str, Any] = comfy.lora.model_lora_keys_unet(model, {})
        self.rows: Counter[str] = Counter()
        for target in self.table.values():
            if isinstance(target, tuple) and target[1] is not None:
                name, (_, start, length) = target[:2]
                self.rows[name] = max(self.rows[name], start + length)
        clip = Tree()
        for component, network in base.texts.items():
            prefix = f"{TEXTS[family][component]}.transformer."
            for name, tensor in network.named_parameters():
                for number in range(LAYERS) if ".layers.0." in name else (0,):
                    deeper = clip_name(name.replace(".layers.0.", f".layers.{number}."))
                    clip.hold({prefix + deeper: tensor[:0]})
        if base.texts:
            comfy.lora.model_lora_keys_clip(clip, self.table)

    def target(self, key: str) -> Any:
        """Return ComfyUI's weight of "denoiser.layer", with its rows where it holds joined ones."""
        component, _, layer = key.partition(".")
        if component != "denoiser":
            number = ("2" if component.endswith("_2") else "1") if self.family == "sdxl" else ""
            return self.table.get(f"lora_te{number}_{clip_name(layer).replace('.', '_')}")
        prefix = "lora_unet_" if self.family in TEXTS else "transformer."
        spelling = layer.replace(".", "_") if prefix == "lora_unet_" else layer
        return self.table.get(prefix + spelling)


def changes(file: Path, names: Names, expected: Mapping[str, Expected]) -> dict[str, Tensor] | str:
    """Return by layer the update [out, in, ...] that ComfyUI makes, or what it does not read."""
    import comfy.lora
    import comfy.lora_convert

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        tensors = load_file(file)
        loaded = comfy.lora.load_lora(comfy.lora_convert.convert_lora(tensors), names.table)
        result = {}
        for key, each in expected.items():
            target = names.target(key)
            if target is None:
                return "no such layer in its table"
            name, offset, order = _parts(target)
            rows = None if offset is None else slice(offset[1], offset[1] + offset[2])
            change = _change(loaded, name, rows, each, names.rows[name])
            result[key] = change if order is None else order(change)
    finally:
        logging.getLogger().removeHandler(handler)
    failed = [message for message in messages if "ERROR" in message]
    return failed[0][:110] if failed else result


def _change(
    loaded: Mapping[Any, Any], name: str, rows: slice | None, each: Expected, total: int
) -> Tensor:
    import comfy.lora

    whole = torch.zeros(total if rows is not None else each.layer.out, *each.layer.inputs)
    if each.layer.out == len(whole) or rows is None:
        whole = each.base_weight
    else:
        whole[rows] = each.base_weight[each.rows]
    # Its rotations are always computed in fp32.
    wide = torch.float32 if each.written.kind == "oft" else torch.float64
    weight = whole.to(wide)
    for target, adapter in loaded.items():
        own, offset, order = _parts(target)
        if own == name:
            patch = (1.0, adapter, 1.0, offset, order)
            weight = comfy.lora.calculate_weight([patch], weight.clone(), name, wide)
    change = weight.double() - whole.double()
    if rows is not None:
        return change[rows]
    return change if len(change) == each.rows.stop - each.rows.start else change[each.rows]


def _parts(target: Any) -> tuple[str, Any, Any]:
    """Return the weight, the rows and the order of its halves that ComfyUI has for a key."""
    return (target, None, None) if isinstance(target, str) else (*target, None, None)[:3]


def outcome(case: Case, names: Names, folder: Path) -> str:
    """Return what became of one file in all formats, in words."""
    file, output = folder / "a.safetensors", folder / "b.safetensors"
    written = {
        key: each
        for key, each in build(case, file, most=2).items()
        if key.startswith("denoiser.") or case.family in TEXTS
    }
    expected = some(written, most=3)
    if not expected and written:  # large layers only: the smallest of them
        key = min(written, key=lambda name: written[name].numbers)
        expected = {key: written[key]}
    if not expected:
        return "text encoders only"
    formula = {key: each.delta for key, each in expected.items()}
    original = changes(file, names, expected)
    words = [f"original {_compared(original, formula)}"]
    for format in families.family(case.family).formats.written:
        try:
            target = AdapterTarget(path=output, format=format, precision="fp32", force=True)
            convert(file, target)
        except LoraTrainError:
            words.append(f"{format} refused")
            continue
        read = changes(output, names, expected)
        words.append(f"{format} {_compared(read, formula)}")
        if not isinstance(original, str) and not isinstance(read, str):
            words[-1] += f", to the original {_compared(read, original)}"
    return "; ".join(words)


def _compared(read: dict[str, Tensor] | str, wanted: Mapping[str, Tensor]) -> str:
    if isinstance(read, str):
        return f"not read ({read})"
    if not any(read[key].any() for key in wanted):
        return "not read"
    worst = max(
        float((read[key].reshape(each.shape) - each).norm() / each.norm())
        for key, each in wanted.items()
    )
    return f"{'equal' if worst <= TOLERANCE else 'OFF'} {worst:.0e}"


def main() -> None:
    """Print a line for every file."""
    options = arguments(__doc__ or "")
    stand_in(*UNUSED)
    sys.path.insert(0, str(options.checkout))
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    print(f"ComfyUI at {options.commit}")
    for family in options.family or CLASSES:
        names, large = Names(family), Names(family, **LARGE.get(family, {}))
        for case in CASES:
            if case.family == family and not case.refused:
                with TemporaryDirectory() as folder:
                    is_large = any(
                        LARGE_WIDTHS.get(family) in each.inputs
                        for part in case.parts
                        for each in part.layers
                    )
                    words = outcome(case, large if is_large else names, Path(folder))
                    print(f"{case.name}: {words}", flush=True)


if __name__ == "__main__":
    main()
