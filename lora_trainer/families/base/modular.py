"""diffusers' modular pipelines, called like its plain ones.

A modular pipeline is a chain of blocks, each with its inputs and components. Some bases have nothing else:
`diffusers.pipelines` lacks a class of theirs. The blocks are taken from diffusers itself, never from the base's folder,
whose index may name code of its own, and the components are given, so nothing is loaded from where the index says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lora_trainer.families.base.traits import Blocks

if TYPE_CHECKING:
    import torch

LATENTS = "latent"
"""The plain pipelines' `output_type` for what is not decoded."""


class ModularImages:
    """Blocks that draw images, with the call of a plain text-to-image pipeline; all else is the modular pipeline's."""

    def __init__(self, modular: Any) -> None:
        self.modular = modular

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["modular"], name)

    def __call__(
        self, *, guidance_scale: float, output_type: str = "pil", **arguments: Any
    ) -> SimpleNamespace:
        """Draw; `images` of the result are images, or latents with `output_type="latent"`."""
        from diffusers import ClassifierFreeGuidance

        if "guider" in self.modular.component_names:
            # The blocks have no argument for it: it is a component.
            guider = ClassifierFreeGuidance(guidance_scale=guidance_scale)
            self.modular.update_components(guider=guider)
        else:  # blocks of a base that draws without guidance, and so takes no negative prompt
            arguments = {
                name: value for name, value in arguments.items() if not name.startswith("negative_")
            }
        wanted = "latents" if output_type == LATENTS else "images"
        return SimpleNamespace(images=self.modular(**arguments, output=wanted))

    def to(self, device: torch.device) -> ModularImages:
        """Move the networks."""
        self.modular.to(device)
        return self

    def set_progress_bar_config(self, **options: Any) -> None:
        """Configure the bars of all blocks; the modular pipeline's own method stops at the outer ones."""
        for block in _all_blocks(self.modular._blocks):
            if hasattr(block, "set_progress_bar_config"):
                block.set_progress_bar_config(**options)


def modular_images(
    blocks: Blocks,
    components: Mapping[str, Any],
    *,
    architecture: Mapping[str, Any],
    latents_of: Any = None,
) -> ModularImages:
    """Return the blocks that turn prompts into images, or encoded prompts into latents of the VAE `latents_of`.

    That VAE is not among the components, so it stays where it is; the blocks read its pixels a latent.
    `architecture` is the denoiser's configuration.
    """
    import diffusers

    # It warns with every guider that the interface may change, and of a scheduler that was not made by the blocks.
    for module in ("guiders.guider_utils", "modular_pipelines.modular_pipeline_utils"):
        logging.getLogger(f"diffusers.{module}").setLevel(logging.ERROR)
    chain = getattr(diffusers, blocks.of(architecture))().get_workflow(blocks.workflow)
    parts = () if latents_of is None else (*blocks.encoding, *blocks.decoding)
    left_out = (*blocks.unused, *parts)
    for block in list(chain.sub_blocks):
        if any(block == each or block.startswith(f"{each}.") for each in left_out):
            chain.sub_blocks.pop(block)
    modular = chain.init_pipeline()
    modular.update_components(**components)
    if latents_of is not None:
        modular.vae = latents_of
    return ModularImages(modular)


def _all_blocks(block: Any) -> list[Any]:
    inner = getattr(block, "sub_blocks", {}).values()
    return [block, *(each for sub_block in inner for each in _all_blocks(sub_block))]
