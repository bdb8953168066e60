"""Writes the table of the public releases' layers: `python scripts/write_layer_tables.py`.

Networks are built on `meta`, without weights; releases of one architecture share a row.
"""

from __future__ import annotations

import json

import torch
from torch import nn

from lora_trainer import families
from lora_trainer.families.layer_tables import FILE, packed


def layers_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that a file could change, by layer, in module order."""
    return {
        name: tuple(module.weight.shape)
        for name, module in network.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
        and not isinstance(module, nn.Embedding)
    }


def main() -> None:
    tables: dict[str, list[object]] = {}
    for name in families.MODULES:
        family = families.family(name)
        rows: list[object] = []
        for release in family.published:
            with torch.device("meta"):
                row = packed(layers_of(family.empty_denoiser(release.architecture)))
            if row not in rows:
                rows.append(row)
        tables[name] = rows
    text = json.dumps(tables, indent=None, separators=(",", ":"))
    FILE.write_text(text.replace("]],[", "]],\n[") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
