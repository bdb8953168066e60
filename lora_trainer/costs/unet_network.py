"""The forward pass of a `UNet2DConditionModel`, recorded on a `Tape`.

It mirrors diffusers 0.42 operation by operation: resnets, transformers, samplers, and the modules
that gradient checkpointing recomputes. Module names are diffusers' own.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_trainer.costs.sample_cost import Array, Group, Layer, Tape


@dataclass(frozen=True, kw_only=True)
class UNet:
    """The numbers that fix the network; tuples have one entry per resolution level."""

    in_channels: int
    out_channels: int
    channels: tuple[int, ...]
    resnets: tuple[int, ...]
    transformers: tuple[int, ...]
    heads: tuple[int, ...]
    down_attention: tuple[bool, ...]
    up_attention: tuple[bool, ...]
    text_width: int
    norm_groups: int
    linear_projection: bool
    time_width: int
    added_width: int
    """Width of the vector embedded beside the timestep (0: none); `pooled_width` of it is pooled text."""
    pooled_width: int
    kernel_in: int
    kernel_out: int


@dataclass(frozen=True)
class FeatureMapShape:
    """Height and width of a feature map, in latent pixels."""

    height: int
    width: int

    @property
    def area(self) -> int:
        return self.height * self.width

    def halved(self) -> FeatureMapShape:
        return FeatureMapShape((self.height + 1) // 2, (self.width + 1) // 2)


@dataclass(frozen=True)
class _Map:
    """A feature map [channels, height, width], or its tokens [height x width, channels]."""

    array: Array
    channels: int
    shape: FeatureMapShape


def walk(unet: UNet, tape: Tape, *, sample: FeatureMapShape, text_tokens: int) -> None:
    """Record one forward pass of one sample on `tape`."""
    _Walk(unet=unet, tape=tape, text=tape.array(text_tokens * unet.text_width)).network(sample)


@dataclass(kw_only=True)
class _Walk:
    unet: UNet
    tape: Tape
    text: Array

    def network(self, sample: FeatureMapShape) -> None:
        unet = self.unet
        time = self._time_embedding()
        latents = _Map(self.tape.array(unet.in_channels * sample.area), unet.in_channels, sample)
        x = self._conv("conv_in", latents, unet.channels[0], kernel=unet.kernel_in, group="other")
        skips = [x]
        for level in range(len(unet.channels)):
            x = self._down_block(x, time, skips, level=level)
        x = self._mid_block(x, time)
        for index in range(len(unet.channels)):
            x = self._up_block(x, time, skips, index=index)
        x = self._silu(self._group_norm("conv_norm_out", x))
        self._conv("conv_out", x, unet.out_channels, kernel=unet.kernel_out, group="other")

    def _time_embedding(self) -> Array:
        waves = self.tape.array(self.unet.channels[0])
        time = self._embedding("time_embedding", waves, self.unet.channels[0])
        if not (added := self.unet.added_width):
            return time
        joined = self.tape.concat(
            self.tape.array(self.unet.pooled_width),
            self.tape.array(added - self.unet.pooled_width),
        )
        return self.tape.add(time, self._embedding("add_embedding", joined, added))

    def _embedding(self, name: str, x: Array, fan_in: int) -> Array:
        width = self.unet.time_width
        hidden = self._linear(f"{name}.linear_1", x, fan_in, width)
        return self._linear(f"{name}.linear_2", self.tape.activation(hidden), width, width)

    def _down_block(self, x: _Map, time: Array, skips: list[_Map], *, level: int) -> _Map:
        name, channels = f"down_blocks.{level}", self.unet.channels[level]
        for index in range(self.unet.resnets[level]):
            x = self._resnet(f"{name}.resnets.{index}", x, time, channels)
            if self.unet.down_attention[level]:
                x = self._transformer(f"{name}.attentions.{index}", x, level=level)
            skips.append(x)
        if level < len(self.unet.channels) - 1:
            x = self._conv(f"{name}.downsamplers.0.conv", x, channels, to=x.shape.halved())
            skips.append(x)
        return x

    def _mid_block(self, x: _Map, time: Array) -> _Map:
        level = len(self.unet.channels) - 1
        # diffusers checkpoints every resnet but the mid block's first
        x = self._resnet_body("mid_block.resnets.0", x, time, x.channels)
        x = self._transformer("mid_block.attentions.0", x, level=level)
        return self._resnet("mid_block.resnets.1", x, time, x.channels)

    def _up_block(self, x: _Map, time: Array, skips: list[_Map], *, index: int) -> _Map:
        level = len(self.unet.channels) - 1 - index
        name, channels = f"up_blocks.{index}", self.unet.channels[level]
        count = self.unet.resnets[level] + 1
        inputs = [x.array, *(skip.array for skip in skips[-count:])]
        for layer in range(count):
            skip = skips.pop()
            joined = self.tape.concat(x.array, skip.array)
            x = _Map(joined, x.channels + skip.channels, skip.shape)
            x = self._resnet(f"{name}.resnets.{layer}", x, time, channels)
            if self.unet.up_attention[index]:
                x = self._transformer(f"{name}.attentions.{layer}", x, level=level)
        self.tape.hold(*inputs)
        if level > 0:
            shape = skips[-1].shape
            x = _Map(self.tape.copy(x.array, elements=channels * shape.area), channels, shape)
            x = self._conv(f"{name}.upsamplers.0.conv", x, channels)
        return x

    def _resnet(self, name: str, x: _Map, time: Array, out: int) -> _Map:
        with self.tape.segment(name):
            return self._resnet_body(name, x, time, out)

    def _resnet_body(self, name: str, x: _Map, time: Array, out: int) -> _Map:
        block_input = x.array
        h = self._silu(self._group_norm(f"{name}.norm1", x))
        h = self._conv(f"{name}.conv1", h, out)
        shift = self._linear(
            f"{name}.time_emb_proj",
            self.tape.activation(time),
            self.unet.time_width,
            out,
            group="convolution",
        )
        h = _Map(self.tape.add(h.array, shift), out, h.shape)
        h = self._silu(self._group_norm(f"{name}.norm2", h))
        h = self._conv(f"{name}.conv2", h, out)
        if x.channels != out:
            x = self._conv(f"{name}.conv_shortcut", x, out, kernel=1)
        scaled = self.tape.copy(self.tape.add(x.array, h.array))
        self.tape.hold(block_input)
        return _Map(scaled, out, x.shape)

    def _transformer(self, name: str, x: _Map, *, level: int) -> _Map:
        tokens = self._project_in(f"{name}.proj_in", self._group_norm(f"{name}.norm", x))
        for block in range(self.unet.transformers[level]):
            each = f"{name}.transformer_blocks.{block}"
            with self.tape.segment(each):
                tokens = self._block(each, before := tokens, level=level)
            self.tape.hold(before.array)
        out = self._project_out(f"{name}.proj_out", tokens)
        return _Map(self.tape.add(out.array, x.array), x.channels, x.shape)

    def _project_in(self, name: str, x: _Map) -> _Map:
        """Record channels first to tokens: a copy before a linear or after a convolutional projection."""
        if self.unet.linear_projection:
            return self._tokens_linear(name, self._copy(x))
        return self._copy(self._conv(name, x, x.channels, kernel=1, group="projection"))

    def _project_out(self, name: str, x: _Map) -> _Map:
        if self.unet.linear_projection:
            return self._copy(self._tokens_linear(name, x))
        return self._conv(name, self._copy(x), x.channels, kernel=1, group="projection")

    def _block(self, name: str, x: _Map, *, level: int) -> _Map:
        width, h = x.channels, x.array
        for part, context in (("1", None), ("2", self.text)):
            normed = self._layer_norm(f"{name}.norm{part}", h, x)
            mixed = self._attention(f"{name}.attn{part}", normed, context, width, level=level)
            self.tape.hold(normed)
            h = self.tape.add(mixed, h)
        normed = self._layer_norm(f"{name}.norm3", h, x)
        wide = self._linear(f"{name}.ff.net.0.proj", normed, width, 8 * width, group="feed_forward")
        value, gate = self.tape.halves(wide)
        gated = self.tape.product(value, self.tape.activation(gate))
        self.tape.hold(normed, mixed)
        out = self._linear(f"{name}.ff.net.2", gated, 4 * width, width, group="feed_forward")
        return _Map(self.tape.add(out, h), width, x.shape)

    def _attention(
        self, name: str, x: Array, context: Array | None, width: int, *, level: int
    ) -> Array:
        source, source_width = (x, width) if context is None else (context, self.unet.text_width)
        q = self._linear(f"{name}.to_q", x, width, width, group="attention", bias=False)
        k = self._linear(f"{name}.to_k", source, source_width, width, group="attention", bias=False)
        v = self._linear(f"{name}.to_v", source, source_width, width, group="attention", bias=False)
        mixed = self.tape.attention(q, k, v, heads=self.unet.heads[level], channels=width)
        out = self._linear(f"{name}.to_out.0", mixed, width, width, group="attention")
        scaled = self.tape.copy(out)
        self.tape.hold(q, k, v)
        return scaled

    def _tokens_linear(self, name: str, x: _Map) -> _Map:
        out = self._linear(name, x.array, x.channels, x.channels, group="projection")
        return _Map(out, x.channels, x.shape)

    def _linear(
        self,
        name: str,
        x: Array,
        fan_in: int,
        out: int,
        *,
        group: Group = "other",
        bias: bool = True,
    ) -> Array:
        count = (fan_in + bias) * out
        layer = Layer(name=name, group=group, fan_in=fan_in, out=out, parameters=count)
        return self.tape.linear(x, layer)

    def _conv(
        self,
        name: str,
        x: _Map,
        out: int,
        *,
        kernel: int = 3,
        to: FeatureMapShape | None = None,
        group: Group = "convolution",
    ) -> _Map:
        """Record a convolution; `to` is the output's shape where a stride makes it smaller."""
        shape, fan_in = to or x.shape, x.channels * kernel * kernel
        layer = Layer(
            name=name,
            group=group,
            fan_in=fan_in,
            out=out,
            parameters=(fan_in + 1) * out,
            kernel=kernel * kernel,
        )
        return _Map(self.tape.conv(x.array, layer, positions=shape.area), out, shape)

    def _group_norm(self, name: str, x: _Map) -> _Map:
        normed = self.tape.norm(x.array, _norm(name, x.channels), groups=self.unet.norm_groups)
        return _Map(normed, x.channels, x.shape)

    def _layer_norm(self, name: str, array: Array, x: _Map) -> Array:
        return self.tape.norm(array, _norm(name, x.channels), groups=x.shape.area)

    def _silu(self, x: _Map) -> _Map:
        return _Map(self.tape.activation(x.array), x.channels, x.shape)

    def _copy(self, x: _Map) -> _Map:
        return _Map(self.tape.copy(x.array), x.channels, x.shape)


def _norm(name: str, channels: int) -> Layer:
    return Layer(name=name, group="norm", fan_in=1, out=channels, parameters=2 * channels)
