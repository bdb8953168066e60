"""Modulation layers with weights in host memory: their outputs are computed ahead for many samples at a time.

In some transformers a quarter to a third of the weights only map the timestep and a pooled text embedding
to shifts, scales and gates, a few vectors per sample. They do not depend on the latents, so their outputs
can be computed for many coming samples together: each weight is copied to the device, applied to all of
them, and overwritten by the next. `ModulatedNetwork` takes these layers out of a frozen network; it knows
nothing of families and samples, only inputs, one [B, width] for each coming pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lora_trainer.network.async_copies import CopyStream, Done
from lora_trainer.network.block_swap import PackedBlock, pack, pin
from lora_trainer.network.swapped_blocks import BUFFERS

SETTING = "memory.modulation_cache"


class ModulationLayer(nn.Module):
    """Replaces a modulation layer in the network; it has no weights and returns the outputs of `source`."""

    def __init__(self, source: ModulatedNetwork, index: int, columns: slice) -> None:
        super().__init__()
        self._source, self._index, self._columns = source, index, columns

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self._source.rows
        if rows is None:
            return self._source.output(self._index, inputs)
        assert len(rows) == len(inputs), "the outputs in place are those of another pass"
        return rows[:, self._columns]


@dataclass(kw_only=True, eq=False)
class _Buffer:
    """Device memory for one layer's weights; `layer` is the layer in it, complete after `arrived`."""

    memory: Tensor
    views: list[list[Tensor]]
    layer: int | None = None
    arrived: Done = None


class ModulatedNetwork:
    """The modulation layers of a network, taken out of it; `width` is the sum of their outputs' widths.

    `rows` are the outputs of the present pass, [B, width] on the device; if None, each call of a layer
    copies its weight to the device. `loads` counts these copies.
    """

    rows: Tensor | None = None

    def __init__(self, network: nn.Module, names: Sequence[str], *, device: torch.device) -> None:
        """Take the linear layers `names` out of a frozen network that is in host memory.

        Raises RequestError for weights that cannot be packed.
        """
        self.names, self.device, self.loads = tuple(names), device, 0
        self._layers: list[nn.Module] = []
        self._columns: list[slice] = []
        self.width = 0
        for index, name in enumerate(names):
            layer = network.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            columns = slice(self.width, self.width + layer.out_features)
            self.width = columns.stop
            self._layers.append(layer)
            self._columns.append(columns)
            network.set_submodule(name, ModulationLayer(self, index, columns))
        self._packed = [PackedBlock(layer, setting=SETTING) for layer in self._layers]
        self._host = pack(self._packed)
        self._host_views = [
            packed.views(part) for packed, part in zip(self._packed, self._host, strict=True)
        ]
        self._copies = CopyStream(device)
        largest = max(packed.bytes for packed in self._packed)
        self._buffers = [self._buffer(largest) for _ in range(min(BUFFERS, len(names)))]

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of the weights."""
        return sum(part.nbytes for part in self._host)

    def pin(self) -> None:
        """Pin the weights in host memory, until the system refuses; call it after more frequent copies' pins."""
        pin(self._host, device=self.device, owner=self)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of device memory of the buffers."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def copy_when_due(self) -> None:
        """Copy on the computing stream from now on, so that no copy runs beside a computation."""
        self._copies = CopyStream(self.device, beside=False)
        self._forget()

    def put_back(self, network: nn.Module) -> None:
        """Put the layers back into the network with their weights on the device, for good."""
        for name, layer, packed, part in zip(
            self.names, self._layers, self._packed, self._host, strict=True
        ):
            packed.hold(packed.views(part.to(self.device, copy=True)))
            network.set_submodule(name, layer)
        self._buffers.clear()
        self._host.clear()
        self._host_views.clear()

    def _forget(self) -> None:
        """Wait for copies that are under way and mark all buffers as empty."""
        for buffer in self._buffers:
            self._copies.wait(buffer.arrived)
            buffer.layer, buffer.arrived = None, None

    @contextmanager
    def giving(self, rows: Tensor | None) -> Iterator[None]:
        """Let the layers return `rows`, [B, width], while a block runs; contexts may be nested."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before

    @torch.no_grad()
    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs [B, width] for each of `inputs`, [B, width of a layer's input], as views.

        Each input is multiplied by itself, as in its own pass, because a product of more rows rounds
        differently.
        """
        sizes = [len(each) for each in inputs]
        all_rows = inputs[0].new_empty(sum(sizes), self.width)
        each_rows = all_rows.split(sizes)
        for index, columns in enumerate(self._columns):
            layer = self._brought(index, then=index + 1)
            for rows, layer_input in zip(each_rows, inputs, strict=True):
                rows[:, columns] = layer(layer_input)
            self._leave(index)
        return list(each_rows)

    @torch.no_grad()
    def output(self, index: int, inputs: Tensor) -> Tensor:
        """Return one layer's output for an input whose outputs were not computed ahead."""
        output: Tensor = self._brought(index, then=(index + 1) % len(self.names))(inputs)
        self._leave(index)
        return output

    # ---- weights on their way

    def _brought(self, index: int, *, then: int) -> nn.Module:
        """Return a layer with its weights on the device, and start to copy the weights of layer `then`."""
        buffer = self._buffer_of(index) or self._load(index)
        self._copies.wait(buffer.arrived)
        self._packed[index].hold(buffer.views[index])
        # The last buffer in the list is in use, the first is free.
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        if then < len(self.names) and self._buffer_of(then) is None:
            self._load(then)
        return self._layers[index]

    def _leave(self, index: int) -> None:
        self._packed[index].hold(self._host_views[index])

    def _buffer_of(self, index: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.layer == index), None)

    def _load(self, index: int) -> _Buffer:
        buffer, source = self._buffers[0], self._host[index]
        buffer.layer = None
        buffer.arrived = self._copies.copy(buffer.memory[: source.nbytes], source)
        buffer.layer = index
        self.loads += 1
        return buffer

    def _buffer(self, size: int) -> _Buffer:
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        return _Buffer(memory=memory, views=[packed.views(memory) for packed in self._packed])
