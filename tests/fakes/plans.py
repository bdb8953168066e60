"""Plans on machines that are described, not there: any base, such as a miniature, GPU and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from lora_trainer import families
from lora_trainer.config import layers as setting_layers
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.hardware.machine import Hardware, tier
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.memory import Load
from lora_trainer.planning.plan import Plan, plan
from lora_trainer.planning.plan_input import PlanInput
from tests.fakes.nvml import GIB

FLUX = "black-forest-labs/FLUX.1-dev"
QWEN = "Qwen/Qwen-Image"
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
CARD = Gpu(
    index=0,
    name="NVIDIA GeForce RTX 3060",
    total_bytes=12 * GIB,
    free_bytes=12 * GIB,
    compute_capability=(8, 6),
    driver="580",
)
LIBRARIES = dict.fromkeys(
    ("bitsandbytes", "prodigyopt", "pytorch-optimizer", "schedulefree", "tensorboard"), "1"
)
MACHINE = Hardware(
    gpus=(CARD,),
    gpu_reason="1 of 1 NVIDIA GPUs usable",
    cpu_name="A Processor",
    cpu_threads=6,
    ram_total_bytes=64 * GIB,
    ram_free_bytes=32 * GIB,
    packages={"torch": "2.13.0", "triton": "3.7.1", "xformers": None, **LIBRARIES},
    reasons={"cpu_threads": "6 physical cores among 12 usable processors"},
    expandable_segments=True,
)
WITHOUT_CARD = replace(MACHINE, gpus=(), gpu_reason="no NVIDIA driver")

MINI_UNET: Mapping[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 16,
    "down_block_types": ["CrossAttnDownBlock2D"] * 2,
    "up_block_types": ["CrossAttnUpBlock2D"] * 2,
    "block_out_channels": [64, 128],
    "layers_per_block": 1,
    "cross_attention_dim": 128,
    "attention_head_dim": [2, 4],
    "norm_num_groups": 16,
}


SD15 = families.family("sd15")


class WideCosts(BaseCosts):
    """Costs in trainers that run every adapter as peft does."""

    @property
    def sample_cost(self) -> Callable[[Any], Any]:
        costs = BaseCosts(family=self.family, facts=self.facts)
        return lambda workload: costs.sample_cost(replace(workload, wide_adapter=True))


def sd15_facts() -> BaseFacts:
    """Return the facts of the public v1.5 release."""
    return replace(next(iter(SD15.releases.values())), source="stable-diffusion-v1-5")


def mini_facts() -> BaseFacts:
    """Return the facts of a base like the embedded one: 64 px, VAE 4x down."""
    counts = {"denoiser": 4_283_012, "vae": 770_000, "text_encoder": 300_000}
    facts = sd15_facts()
    return replace(
        facts,
        source="embedded",
        resolution_px=64,
        bucket_step_px=8,
        vae_factor=4,
        parts={name: replace(part, parameters=counts[name]) for name, part in facts.parts.items()},
        release=replace(facts.release, architecture=MINI_UNET),
    )


def machine(gib: float = 12, *, ram_gib: float = 28, packages: Any = (), **gpu: Any) -> Hardware:
    """Return one with an empty GPU of this size, whose plans may use `ram_gib` beside it."""
    size = int(gib * GIB)
    return replace(
        MACHINE,
        gpus=(replace(CARD, **{"total_bytes": size, "free_bytes": size, **gpu}),),
        ram_free_bytes=int((ram_gib + 4) * GIB),  # the margin of 4 GiB is not planned with
        packages={**MACHINE.packages, **dict(packages)},
    )


def request(
    base: str | BaseFacts | None = None,
    hardware: Hardware = MACHINE,
    *,
    overrides: dict[str, Any] | None = None,
    priority: Any = "balanced",
    preset_tier: str = "",
    layers: dict[str, str] | None = None,
    **changes: Any,
) -> PlanInput:
    """Return the input of a plan for 20 images; `base` is a Hub id or facts, None: Stable Diffusion 1.5.

    `layers` maps settings to the layers that are said to have set them.
    """
    facts = families.known_base(base) if isinstance(base, str) else base or sd15_facts()
    assert facts is not None
    resolved = setting_layers.resolve(
        setting_layers.AskedFor(overrides=overrides or {}),
        family=facts.family,
        tier=preset_tier or tier(hardware.gpus[0].total_bytes if hardware.gpus else None),
        priority=priority,
    )
    sampling = resolved.config.sampling
    set_by = {key: setting_layers.Origin(layer=layer) for key, layer in (layers or {}).items()}
    plain = PlanInput(
        decided={"output.format": ("kohya", "known before")},
        resolved=replace(resolved, origins={**resolved.origins, **set_by}),
        facts=facts,
        family=families.family(facts.family),
        hardware=hardware,
        images=20,
        samples_per_epoch=20,
        buckets=(),
        latents=20 * (1 + resolved.config.data.flip),
        texts=20,
        prompts=len(sampling.prompts) or sampling.prompts_from_captions,
    )
    return replace(plain, **changes)


def planned(base: str | BaseFacts | None = None, hardware: Hardware = MACHINE, **how: Any) -> Plan:
    """Plan a run; the arguments are those of `request`."""
    return plan(request(base, hardware, **how))


@cache
def costs_of(base: str | None = None) -> BaseCosts:
    """Return the costs of a base."""
    return request(base).costs


@cache
def _load() -> Load:
    asked = {"adapter.rank": 16, "adapter.targets": "attention", "sampling.every_steps": 0}
    return planned(overrides={**asked, "train.batch_size": 1, "data.prefetch_steps": 4}).load


def load_of(**changes: Any) -> Load:
    """Return the load of Stable Diffusion 1.5 with changes; `rank=8` and such are of its adapter."""
    fields = {name: changes.pop(name) for name in list(changes) if hasattr(_load(), name)}
    adapter = AdapterSettings(**{"rank": 16, "targets": "attention", **changes})
    return replace(_load(), **{"adapter": adapter, **fields})


def bytes_by_name(items: Any) -> dict[str, int]:
    """Return the bytes of memory items by their names, which are unique; each has a note."""
    assert len({item.name for item in items}) == len(items) and all(item.note for item in items)
    return {item.name: item.bytes for item in items}
