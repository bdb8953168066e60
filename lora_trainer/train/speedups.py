"""Compiled blocks and CUDA graphs: they make the passes of a step faster and do not change their result.

Each can be switched off at any time, for good, and the run continues with the same random draws. The
guard state records it, so a resumed run does not try it again.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from lora_trainer.data.batches import Stacked
from lora_trainer.model.compiling import CompiledBlocks
from lora_trainer.train.graphed import StepGraphs

COMPILE, GRAPHS = "hardware.compile", "hardware.cuda_graphs"
"""The settings that switch them on."""
LatentShape = tuple[int, int, int]
"""(height, width, images) of the latents of a pass."""


@dataclass(kw_only=True)
class Speedups:
    """Compiled blocks and CUDA graphs in use; None if not set, or after a failure.

    Only passes of `compiled_shapes` run compiled (None: all). The shapes are fixed before the first step,
    because compiled code rounds differently: if they depended on the order in which shapes come up, an
    interrupted run would end with other weights.
    """

    compiled: CompiledBlocks | None = None
    compiled_shapes: Collection[LatentShape] | None = None
    graphs: StepGraphs | None = None
    uncompiled: bool = False
    ungraphed: bool = False
    """True after compiled blocks, or graphs, have failed and were switched off."""
    _told: set[str] = field(default_factory=set)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradient tensors stay allocated from step to step and are zeroed in place."""
        return self.graphs is not None and self.graphs.holding

    def is_compiled(self, stacked: Stacked) -> bool:
        """Say whether a pass over these samples runs compiled."""
        planned = self.compiled_shapes
        return self.compiled is not None and (planned is None or stacked.latents_shape in planned)

    def compilation(self, stacked: Stacked) -> AbstractContextManager[None]:
        """Run the blocks compiled inside the context if the shape is planned; raises CompilationFailed."""
        if self.compiled is None or not self.is_compiled(stacked):
            return nullcontext()
        return self.compiled.used()

    def newly_unplanned(self, stacked: Stacked) -> list[str]:
        """Return the settings in force that are not used for these samples, each setting only once."""
        without = {
            COMPILE: self.compiled is not None and not self.is_compiled(stacked),
            GRAPHS: self.graphs is not None and self.graphs.is_left_out(stacked),
        }
        new_keys = [key for key, out in without.items() if out and key not in self._told]
        self._told.update(new_keys)
        return new_keys

    def make_room(self) -> None:
        """Free the memory of recordings between steps; the next steps record again."""
        if self.keeps_gradients and self.graphs is not None:
            self.graphs.release()

    def give_up_compiling(self) -> None:
        """Run the blocks uncompiled from now on."""
        self.compiled, self.uncompiled = None, True

    def give_up_graphs(self) -> None:
        """Launch kernels one by one from now on, and free the memory of the recordings."""
        if self.graphs is not None:
            self.graphs.release()
        self.graphs, self.ungraphed = None, True
