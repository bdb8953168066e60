"""Write tests/checkpoint_files/kitchen.safetensors: weights in the layouts of comfy-kitchen, and what it reads in them.

Usage: pip install --no-deps comfy-kitchen==0.2.40; python -m scripts.kitchen_file

The package is not a dependency: the file is made once, and tests read it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FILE = Path(__file__).parents[1] / "tests" / "checkpoint_files" / "kitchen.safetensors"


def main() -> None:
    import comfy_kitchen
    from comfy_kitchen import tensor as layouts

    int8 = {"per_channel": True, "convrot": True}
    # Layer -> rows, columns, layout, its options, what ComfyUI states of it beside the format.
    rows: dict[str, tuple[int, int, Any, dict[str, Any], str, dict[str, Any]]] = {
        "fp8": (16, 24, layouts.TensorCoreFP8Layout, {"scale": 0.01}, "float8_e4m3fn", {}),
        "int8": (12, 20, layouts.TensorWiseINT8Layout, {}, "int8_tensorwise", {}),
        "row": (12, 20, layouts.TensorWiseINT8Layout, {"per_channel": True}, "int8_tensorwise", {}),
        "turned": (
            6,
            512,
            layouts.TensorWiseINT8Layout,
            int8,
            "int8_tensorwise",
            {"convrot": True},
        ),
        "turned16": (
            *(6, 48, layouts.TensorWiseINT8Layout, int8 | {"convrot_groupsize": 16}),
            *("int8_tensorwise", {"convrot": True, "convrot_groupsize": 16}),
        ),
        "mxfp8": (160, 160, layouts.TensorCoreMXFP8Layout, {}, "mxfp8", {}),
        "nvfp4": (160, 80, layouts.TensorCoreNVFP4Layout, {}, "nvfp4", {}),
        "padded": (30, 40, layouts.TensorCoreNVFP4Layout, {}, "nvfp4", {"orig_shape": [30, 40]}),
    }
    tensors, stated = dict[str, torch.Tensor](), dict[str, Any]()
    generator = torch.Generator().manual_seed(0)
    with comfy_kitchen.registry.use_backend("eager"):
        for name, (out, width, layout, options, called, said) in rows.items():
            weight = torch.randn(out, width, generator=generator)
            weight[1] = 0
            stored, params = layout.quantize(weight, **options)
            parts = layout.state_dict_tensors(stored, params)
            tensors |= {f"{name}.weight{end}": part.contiguous() for end, part in parts.items()}
            values = layout.dequantize(stored, params)[:out, :width]
            tensors[f"{name}.values"] = values.contiguous()
            stated[name] = {"format": called, **said}
    save_file(tensors, FILE, metadata={"_quantization_metadata": json.dumps({"layers": stated})})


if __name__ == "__main__":
    main()
