"""What it costs to keep blocks, or their inputs, in host memory, and how much of the copying is hidden.

Usage: python benchmarks/streaming.py [--base HUB_ID] [--pixels 512] [--rounds 5] [--json FILE]

One random network of the base's own blocks, fewer and (on a CPU) narrower ones, trains a LoRA on one
image in turns: all weights on the device; half and all of the blocks streamed; streamed with copies
that nothing hides; block inputs in host memory. Turns are interleaved, so a machine that slows down
slows all. On a CPU, where host and device are one, the ratio is what the mechanism alone costs.
Prints JSON: medians, device memory, and how far the gradients are from those of the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lora_trainer import families  # noqa: E402
from lora_trainer.config.config import AdapterSettings  # noqa: E402
from lora_trainer.costs.sample_cost import Checkpointing  # noqa: E402
from lora_trainer.families.base import DENOISER, BaseFacts, Family  # noqa: E402
from lora_trainer.families.flow import FlowFamily  # noqa: E402
from lora_trainer.lora.adapter import Adapter, inject  # noqa: E402
from lora_trainer.network.async_copies import CopyStream  # noqa: E402
from lora_trainer.network.block_swap import (  # noqa: E402
    Streamed,
    block_sizes,
    repeated_blocks,
    stream_blocks,
)
from lora_trainer.network.checkpointing import apply_checkpointing  # noqa: E402

BASE = "black-forest-labs/FLUX.1-dev"
FEWER: Mapping[str, Mapping[str, int]] = {
    "cuda": {"num_layers": 4, "num_single_layers": 8},
    "cpu": {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4},
}
"""The architecture's settings that are changed, where it has them."""
TEXT_TOKENS = 512
SEED = 3


class UnhiddenCopies(CopyStream):
    """Copies on the stream of the computation, which waits for each."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = None


@dataclass(kw_only=True)
class Trainee:
    """A random denoiser on its device, its LoRA, and one batch."""

    family: Family
    facts: BaseFacts
    denoiser: nn.Module
    adapter: Adapter
    device: torch.device
    noisy: Tensor
    timesteps: Tensor
    conditioning: Mapping[str, Tensor]

    def step(self) -> float:
        """Train one step without its optimizer; return the seconds, gradients stay.

        On a CPU they are those of the processor, which other programs on the machine change little.
        """
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        for parameter in self.adapter.parameters():
            parameter.grad = None
        self.wait()
        began = clock()
        predicted = self.family.predict(
            self.denoiser, self.noisy, self.timesteps, self.conditioning
        )
        predicted.float().square().mean().backward()
        self.wait()
        return clock() - began

    def gradient(self) -> Tensor:
        """Return all gradients of the last step as one vector on the CPU."""
        found = [parameter.grad for parameter in self.adapter.parameters()]
        return torch.cat([grad.flatten().cpu() for grad in found if grad is not None])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(kw_only=True)
class Turn:
    """One way to train; `blocks` are streamed."""

    checkpointing: Checkpointing = "full"
    blocks: int = 0
    copies: type[CopyStream] = CopyStream
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loads_per_step: float = 0.0
    host_bytes: int = 0
    gradient_difference: float = 0.0

    @contextmanager
    def applied(self, at: Trainee) -> Iterator[Streamed | None]:
        """Train this way while the block runs."""
        apply_checkpointing(at.denoiser, self.checkpointing)
        if not self.blocks:
            yield None
            return
        with patch("lora_trainer.network.block_swap.CopyStream", self.copies):
            streamed = stream_blocks(at.denoiser, count=self.blocks, device=at.device)
        try:
            yield streamed
        finally:
            streamed.remove()

    def take(self, at: Trainee, *, steps: int) -> Tensor:
        """Take steps after one that does not count; return the gradient of the last."""
        with self.applied(at) as streamed:
            at.step()
            if at.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(at.device)
            before = streamed.loads if streamed else 0
            self.seconds += [at.step() for _ in range(steps)]
            if streamed is not None:
                self.loads_per_step = (streamed.loads - before) / steps
                self.host_bytes = streamed.host_bytes
            if at.device.type == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated(at.device)
            return at.gradient()

    def result(self) -> dict[str, Any]:
        """Return the numbers of all rounds."""
        return {
            "checkpointing": self.checkpointing,
            "streamed_blocks": self.blocks,
            "median_s": statistics.median(self.seconds),
            "quartiles_s": statistics.quantiles(self.seconds, n=4),
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.host_bytes,
            "loads_per_step": self.loads_per_step,
            "gradient_difference": self.gradient_difference,
        }


def trainee(source: str, *, pixels: int, device: torch.device) -> Trainee:
    """Build the network on the CPU and move it; raises SystemExit for a base not known by name."""
    facts = families.known_base(source)
    family = families.family(facts.family) if facts is not None else None
    if facts is None or not isinstance(family, FlowFamily):
        sys.exit(f"{source} is not a flow-matching base that is known by name")
    changed = {key: n for key, n in FEWER[device.type].items() if key in facts.architecture}
    architecture = {**facts.architecture, **changed}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(SEED)
    denoiser = family.empty_denoiser(architecture).requires_grad_(False).to(dtype)
    adapter = inject(
        {DENOISER: denoiser},
        modules={DENOISER: family.lora_targets(denoiser, "transformer")},
        settings=AdapterSettings(rank=16),
        alpha=16.0,
        seed=SEED,
    )
    shapes = family.prompt_shapes(architecture, text_tokens=TEXT_TOKENS)
    prompt = {
        name: torch.ones(shape, dtype=torch.int64)
        if name.endswith("mask")
        else torch.randn(shape, dtype=dtype)
        for name, shape in shapes.items()
    }
    told = family.guidance_conditioning(facts, guidance_scale=1.0)
    side = pixels // facts.vae_factor
    return Trainee(
        family=family,
        facts=facts,
        denoiser=denoiser.to(device),
        adapter=adapter,
        device=device,
        noisy=torch.randn(1, facts.latent_channels, side, side, dtype=dtype, device=device),
        timesteps=torch.full((1,), 500.0, device=device),
        conditioning={name: value.to(device) for name, value in {**prompt, **told}.items()},
    )


def measure(at: Trainee, *, rounds: int, steps: int) -> dict[str, Any]:
    """Let all ways take turns; return their numbers and what follows from them."""
    count = len(repeated_blocks(at.denoiser))
    turns = {
        "resident": Turn(),
        "half_streamed": Turn(blocks=count // 2),
        "streamed": Turn(blocks=count),
        "inputs_offloaded": Turn(checkpointing="offloaded"),
    }
    if at.device.type == "cuda":
        turns["streamed_unhidden"] = Turn(blocks=count, copies=UnhiddenCopies)
    expected = turns["resident"].take(at, steps=1)
    turns["resident"].seconds.clear()
    for _ in range(rounds):
        for turn in turns.values():
            found = turn.take(at, steps=steps)
            turn.gradient_difference = float((found - expected).norm() / expected.norm())
    results = {name: turn.result() for name, turn in turns.items()}
    seconds = {name: result["median_s"] for name, result in results.items()}
    numbers = {
        "turns": results,
        "ratio_to_resident": {name: one / seconds["resident"] for name, one in seconds.items()},
    }
    if at.device.type == "cuda":
        copying = seconds["streamed_unhidden"] - seconds["resident"]
        seen = seconds["streamed"] - seconds["resident"]
        numbers["hidden_share_of_copying"] = 1 - seen / copying
    return numbers


def show(text: str, file: Path | None) -> None:
    """Print the numbers and keep them."""
    print(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=BASE, help="Hub id of a flow-matching base")
    parser.add_argument("--pixels", type=int, help="side of the image; 512, on a CPU 128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--threads", type=int, help="threads of torch; else its own choice")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pixels = options.pixels or (512 if device.type == "cuda" else 128)
    at = trainee(options.base, pixels=pixels, device=device)
    numbers = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "base": options.base,
        "pixels": pixels,
        "block_elements": block_sizes(at.denoiser),
        **measure(at, rounds=options.rounds, steps=options.steps),
    }
    show(json.dumps(numbers, indent=2), options.json)


if __name__ == "__main__":
    main()
