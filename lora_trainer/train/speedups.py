"""What makes the passes of a step faster without changing what they compute: compiled blocks, graphs.

Either can be given up at any time, for good: the run goes on with the same draws. What was given up is
part of the guards' state, so a resumed run does not try it again.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from lora_trainer.data.batches import Stacked
from lora_trainer.model.compiling import CompiledBlocks
from lora_trainer.train.graphed import StepGraphs

COMPILE, GRAPHS = "hardware.compile", "hardware.cuda_graphs"
"""The settings that ask for them."""
LatentShape = tuple[int, int, int]
"""(height, width, images) of the latents of a pass."""


@dataclass(kw_only=True)
class Speedups:
    """Compiled blocks and graphs in use; None: not asked for, or given up.

    Passes of `compiled_shapes` run compiled, others as without: which ones is known before the first
    step, so that it does not depend on where a run was interrupted. None: all.
    """

    compiled: CompiledBlocks | None = None
    compiled_shapes: Collection[LatentShape] | None = None
    graphs: StepGraphs | None = None
    uncompiled: bool = False
    ungraphed: bool = False
    """Whether either was given up."""
    _told: set[str] = field(default_factory=set)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay where they are from step to step, and are zeroed instead of dropped."""
        return self.graphs is not None and self.graphs.holding

    def is_compiled(self, given: Stacked) -> bool:
        """Say whether a pass over these samples runs compiled."""
        planned = self.compiled_shapes
        return self.compiled is not None and (planned is None or given.latents_shape in planned)

    def compilation(self, given: Stacked) -> AbstractContextManager[None]:
        """Let a pass over these samples run compiled, if it is to; raises CompilationFailed."""
        if self.compiled is None or not self.is_compiled(given):
            return nullcontext()
        return self.compiled.used()

    def newly_unplanned(self, given: Stacked) -> list[str]:
        """Return the settings that these samples go without while they are in force, each once."""
        without = {
            COMPILE: self.compiled is not None and not self.is_compiled(given),
            GRAPHS: self.graphs is not None and self.graphs.is_left_out(given),
        }
        found = [key for key, out in without.items() if out and key not in self._told]
        self._told.update(found)
        return found

    def make_room(self) -> None:
        """Give the memory of recordings back between steps; the next steps are recorded anew."""
        if self.keeps_gradients and self.graphs is not None:
            self.graphs.release()

    def give_up_compiling(self) -> None:
        """Run the blocks as they are from now on."""
        self.compiled, self.uncompiled = None, True

    def give_up_graphs(self) -> None:
        """Start kernels one by one from now on; the memory of the recordings is given back."""
        if self.graphs is not None:
            self.graphs.release()
        self.graphs, self.ungraphed = None, True
