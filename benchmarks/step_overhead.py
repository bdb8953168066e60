"""What our training loop costs over a bare forward, backward and optimizer step.

Usage: python benchmarks/step_overhead.py [--steps 60] [--threads N] [--block 5] [--json FILE]

Both sides train the same LoRA on the same random Stable Diffusion 1.x denoiser, of a size that takes
about half a second a step, on the same inputs. Ours is `lora_trainer.train.loop.run` with a feeder
over a real cache, a learning-rate schedule, guards, events.jsonl and status.json; the bare loop has
its tensors in memory. They take turns in one process, in blocks A B B A A B B A, so that a machine
that slows down slows both. Prints medians, their ratio and the share of a step spent waiting for data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from mid_size import (
    CPU,
    FAMILY,
    ROOT,
    Inputs,
    build_adapter,
    build_denoiser,
    build_feeder,
    inputs_of,
)
from torch import Tensor, nn

sys.path.insert(0, str(ROOT))

from lora_trainer.config import Config  # noqa: E402
from lora_trainer.events import Event, EventStream, JsonlWriter  # noqa: E402
from lora_trainer.output.status import StatusWriter  # noqa: E402
from lora_trainer.train.guards import GuardState  # noqa: E402
from lora_trainer.train.loop import run  # noqa: E402
from lora_trainer.train.optim import build_optimizer, learning_rate  # noqa: E402
from lora_trainer.train.progress import Progress  # noqa: E402
from lora_trainer.train.training import Model, Training  # noqa: E402


@dataclass(kw_only=True)
class Bare:
    """The bare loop: what anybody would write first, with its own optimizer and nothing around it."""

    denoiser: nn.Module
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    inputs: Sequence[Inputs]
    max_grad_norm: float
    seconds: list[float] = field(default_factory=list)

    def loss(self, step: Inputs) -> Tensor:
        alpha, sigma = step.alpha.view(-1, 1, 1, 1), step.sigma.view(-1, 1, 1, 1)
        noisy = alpha * step.latents + sigma * step.noise
        predicted = self.denoiser(
            noisy, step.timesteps, encoder_hidden_states=step.text, return_dict=False
        )[0]
        per_sample = (predicted - step.noise).square().mean(dim=(1, 2, 3))
        loss: Tensor = (step.weights * per_sample).mean()
        return loss

    def take_steps(self, count: int) -> None:
        """Train `count` steps and keep the time of each."""
        for _ in range(count):
            began = time.perf_counter()
            loss = self.loss(self.inputs[len(self.seconds)])
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.seconds.append(time.perf_counter() - began)

    def first_loss_and_norm(self) -> tuple[float, float]:
        """Return loss and gradient norm of the first step's inputs; changes nothing."""
        loss = self.loss(self.inputs[0])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, float("inf"))
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), float(norm)


@dataclass(kw_only=True)
class Turns:
    """An action of our loop: times our steps, and lets the bare loop have its turns in between.

    The loop asks `due` once before the first step and at the end of every step. What lies between
    two askings is all that a step costs.
    """

    bare: Bare
    block: int
    seconds: list[float] = field(default_factory=list)
    resumed_at_s: float = 0.0

    def due(self, progress: Progress) -> bool:
        now_s = time.perf_counter()
        if progress.step:
            self.seconds.append(now_s - self.resumed_at_s)
        self.resumed_at_s = now_s
        return progress.step % (2 * self.block) == self.block

    def __call__(self, progress: Progress) -> None:
        """Take two blocks of the bare loop; the loop calls this right after a true `due`."""
        self.bare.take_steps(2 * self.block)
        self.resumed_at_s = time.perf_counter()


def build_training(
    folder: Path, *, steps: int, batch: int, block: int, on_step: Callable[[Event], None]
) -> tuple[Training, Bare, Turns]:
    """Return our loop, ready to run, the bare loop and the action that lets them take turns."""
    config, events = Config(), EventStream()
    events.subscribe(on_step)
    events.subscribe(JsonlWriter(folder / "events.jsonl", lambda kind: kind != "problem", events))
    events.subscribe(StatusWriter(folder, events))
    denoiser = build_denoiser()
    adapter = build_adapter(denoiser, config)
    parameters = adapter.parameters()
    feeder = build_feeder(folder, config, events, batch=batch)
    # A feeder of its own, so that ours finds its entries on disk and not yet in RAM.
    inputs = inputs_of(build_feeder(folder, config, events, batch=batch), steps=steps)
    settings, rate = config.optimizer, config.optimizer.learning_rate
    optimizer = torch.optim.AdamW(
        parameters,
        lr=rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    bare = Bare(
        denoiser=denoiser,
        parameters=parameters,
        optimizer=optimizer,
        inputs=inputs,
        max_grad_norm=config.train.max_grad_norm,
    )
    turns = Turns(bare=bare, block=block)
    training = Training(
        model=Model(
            denoiser=denoiser,
            predict=FAMILY.predict,
            embed=lambda conditioning: conditioning,
            prediction="epsilon",
            precision=torch.float32,
            device=CPU,
        ),
        parameters=parameters,
        optimizer=build_optimizer(adapter.groups(settings), settings),
        learning_rate=learning_rate(settings, steps=steps),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        feeder=feeder,
        steps=steps,
        batch_size=batch,
        micro_batch=batch,
        prefetch_steps=config.data.prefetch_steps,
        max_grad_norm=config.train.max_grad_norm,
        events=events,
        actions=[turns],
        stop=lambda: None,
    )
    return training, bare, turns


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds per step of either side, ours over bare, and the share of our time spent waiting."""

    threads: int
    batch: int
    steps: int
    block: int
    ours_median_s: float
    bare_median_s: float
    ratio: float
    ours_quartiles_s: list[float]
    bare_quartiles_s: list[float]
    wait_share_median: float
    wait_share_after_first: float
    first_wait_s: float
    loss_difference: float
    grad_norm_difference: float


def measure(options: argparse.Namespace) -> Result:
    """Run both loops and compare; exits when they do not compute the same."""
    rows: list[dict[str, Any]] = []

    def on_step(event: Event) -> None:
        if event.kind == "step":
            rows.append(dict(event.fields))

    with tempfile.TemporaryDirectory(prefix="step-overhead-") as folder:
        training, bare, turns = build_training(
            Path(folder), steps=options.steps, batch=options.batch, block=options.block, on_step=on_step
        )  # fmt: skip
        loss, norm = bare.first_loss_and_norm()  # also the warm-up
        run(training, Progress(step=0, images=0, guard=GuardState(micro_batch=options.batch)))
    losses = abs(rows[0]["loss"] / loss - 1)
    norms = abs(rows[0]["grad_norm"] / norm - 1)
    if max(losses, norms) > 1e-4:
        sys.exit(f"not the same maths: loss {rows[0]['loss']} and {loss}, norm differs by {norms}")
    ours_s, bare_s = statistics.median(turns.seconds), statistics.median(bare.seconds)
    return Result(
        threads=torch.get_num_threads(),
        batch=options.batch,
        steps=options.steps,
        block=options.block,
        ours_median_s=ours_s,
        bare_median_s=bare_s,
        ratio=ours_s / bare_s,
        ours_quartiles_s=statistics.quantiles(turns.seconds, n=4),
        bare_quartiles_s=statistics.quantiles(bare.seconds, n=4),
        wait_share_median=statistics.median(row["data_wait_s"] / row["seconds"] for row in rows),
        wait_share_after_first=sum(row["data_wait_s"] for row in rows[1:])
        / sum(row["seconds"] for row in rows[1:]),
        first_wait_s=rows[0]["data_wait_s"],
        loss_difference=losses,
        grad_norm_difference=norms,
    )


def show(result: Result) -> None:
    """Print the table that goes into docs/LOG.md."""
    print(f"torch {torch.__version__}, {result.threads} threads, batch {result.batch}")
    print("| Loop | Steps | Median s | Quartiles s |\n| --- | --- | --- | --- |")
    for name, median, (low, _, high) in (
        ("ours", result.ours_median_s, result.ours_quartiles_s),
        ("bare", result.bare_median_s, result.bare_quartiles_s),
    ):
        print(f"| {name} | {result.steps} | {median:.4f} | {low:.4f} to {high:.4f} |")
    print(f"ratio of medians {result.ratio:.4f}")
    print(
        f"waiting for data: median {result.wait_share_median:.4%} of a step, "
        f"all steps after the first {result.wait_share_after_first:.4%}, "
        f"the first {result.first_wait_s * 1000:.1f} ms"
    )
    print(
        f"first step, relative difference: loss {result.loss_difference:.1e}, "
        f"gradient norm {result.grad_norm_difference:.1e}"
    )


def main() -> None:
    """Read the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of either loop")
    parser.add_argument("--block", type=int, default=5, help="steps in a row of one loop")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--threads", type=int, help="threads of torch; else its own choice")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    if options.steps % (2 * options.block):
        parser.error(f"--steps must be a multiple of twice --block ({2 * options.block})")
    if options.threads:
        torch.set_num_threads(options.threads)
    result = measure(options)
    show(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
