"""The spellings of adapter files: the role of a tensor by the end of its key, a layer by the rest.

Input is a key, or a family and its layers; output is plain names. Torch-free. The same rules serve
inspecting, reading and converting: dots and underscores count as one, known prefixes fall away, and a
family has tables of its layers' other names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from lora_trainer.families.base import DENOISER, Family, FileFormat
from lora_trainer.lora.adapter_size import AdapterKind

Role = str
"""What a tensor is to its module: `down`, `alpha`, `w1_a` and others, see `_ENDS`."""
Shape = tuple[int, ...]

ENDINGS: Mapping[AdapterKind, Mapping[Role, str]] = {
    "lora": {
        "down": ".lora_down.weight",
        "up": ".lora_up.weight",
        "magnitude": ".dora_scale",
    },
    "loha": {
        **{role: f".hada_{role}" for role in ("w1_a", "w1_b", "w2_a", "w2_b")},
        "magnitude": ".dora_scale",
    },
    "lokr": {
        **{role: f".lokr_{role}" for role in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")},
        "magnitude": ".dora_scale",
    },
    "oft": {"blocks": ".oft_blocks", "rescale": ".rescale"},
    "oft_in": {"skew": ".oft_R.weight", "scaled": ".oft_R.scaled_oft"},
    "glora": {role: f".{role}.weight" for role in ("a1", "a2", "b1", "b2")},
    "ia3": {"factor": ".weight", "on_input": ".on_input"},
    "full": {"difference": ".diff"},
    "norm": {"difference": ".w_norm", "bias": ".b_norm"},
}
"""Ends of keys as kohya and LyCORIS write them, by kind and role; files with dotted names of
ComfyUI's own use them too, but for the two factors of a LoRA."""
BIAS = ".diff_b"
"""The change of a bias, beside any kind but a norm."""
PEFT_ENDINGS: Mapping[Role, str] = {
    "down": ".lora_A.weight",
    "up": ".lora_B.weight",
    "magnitude": ".lora_magnitude_vector",
}
ALPHA = ".alpha"
SCALED: frozenset[AdapterKind] = frozenset({"lora", "loha", "lokr", "glora"})
"""Kinds whose alpha is a strength."""
STRONG = frozenset({"up", "w1", "w1_a", "a1", "b1"})
"""The factors that take the strength that a file does not state: each product has one of these."""

_NAME = r"(?:\.(?!weight|bias|alpha)\w+)?"
"""peft's name of an adapter, such as `.default`."""
_LOHA: tuple[Role, ...] = ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")
_LOKR: tuple[Role, ...] = ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")
_GLORA: tuple[Role, ...] = ("a1", "a2", "b1", "b2", "bm")


def _factor(side: str, letter: str, role: Role) -> str:
    """Return the end of a LoRA factor's key in the names of kohya, of peft and of diffusers before it."""
    return (
        rf"(?:\.lora_{side}|\.lora_{letter}|[._]lora(?P<digit_{role}>\d?)\.{side}"
        rf"|\.lora_linear_layer\.{side})(?:\.(?P<part_{role}>\d+)|{_NAME})"
    )


_ENDS: tuple[tuple[AdapterKind | None, Role, str], ...] = (
    (None, "alpha", r"\.(?:lora_)?alpha"),
    ("lora", "down", _factor("down", "A", "down") + r"\.weight"),
    ("lora", "up", _factor("up", "B", "up") + r"\.weight"),
    ("lora", "up_bias", _factor("up", "B", "up_bias") + r"\.bias"),
    ("lora", "mid", r"\.lora_mid\.weight"),
    ("lora", "magnitude", r"\.(?:dora_scale|lora_magnitude_vector)(?:\.\w+)*"),
    *(("loha", role, rf"\.hada_{role}{_NAME}") for role in _LOHA),
    *(("lokr", role, rf"\.lokr_{role}{_NAME}") for role in _LOKR),
    ("oft", "blocks", r"\.oft_blocks"),
    ("oft", "rescale", r"\.rescale"),
    ("oft_in", "skew", rf"\.oft_R{_NAME}\.weight"),
    ("oft_in", "scaled", rf"\.oft_R{_NAME}\.scaled_oft"),
    *(("glora", role, rf"\.{role}\.weight") for role in _GLORA),
    ("ia3", "on_input", r"\.on_input"),
    ("full", "difference", r"\.diff"),
    (None, "bias", r"\.diff_b"),
    ("norm", "difference", r"\.w_norm"),
    ("norm", "bias", r"\.b_norm"),
)
"""Ends of keys in files of all trainers, by kind and role."""
# The lookahead is for speed: nearly all characters of a key begin no end.
_KEY = re.compile(
    r"(?P<module>.+?)(?=\.|_lora)(?:"
    + "|".join(f"(?P<end{number}>{end})" for number, (_, _, end) in enumerate(_ENDS))
    + ")"
)
PART_MARK = "#"
"""Between the name of a joined layer and the number of the part that a pair of factors is for."""


_OTHER_KINDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (
            r"(?:unet|text_encoder):\d+:(?:up|down)",
            "LoRAs that number their layers instead of naming them",
        ),
        (r".+\.lora_(?:up|down)", "LoRAs in Nunchaku's form, made for its quantised networks"),
        (r".+\.(?:[pq]_layer\.weight|lambda_layer)", "T-LoRAs, whose rank goes with the timestep"),
        (r".+\.(?:scale_weight|weight_scale|scale_input)", "LoRAs whose fp8 factors have scales"),
        (
            r".+\.modules_to_save\..+",
            "LoRAs with whole layers beside them (peft's modules_to_save)",
        ),
        (r".+\.reshape_weight|.+_norm\.scale", "control LoRAs, which need an image as a condition"),
        (r"control_model\..+|lora_controlnet", "control LoRAs, which need an image as a condition"),
        (r"\d+\.linear\d?\..+|\d+\.linear\d", "hypernetworks"),
        (r"emb_params|clip_[lg]|string_to_param.*", "embeddings, the vectors of new words"),
    )
)


def kind_of_others(keys: Iterable[str]) -> str:
    """Return of which files these keys are as a note in brackets, "" where that is not known."""
    for pattern, kind in _OTHER_KINDS:
        if any(pattern.fullmatch(key) for key in keys):
            return f" (as in {kind})"
    return ""


def parse_key(key: str) -> tuple[str, AdapterKind | None, Role] | None:
    """Return (module as spelt, kind, role) of a tensor, None for a tensor of no adapter.

    The kind of an alpha is that of the tensors beside it. A magnitude is said to be a LoRA's, whatever
    it stands beside. Factors in a list (`lora_down.0`) are of a part of the module: `module#0`.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    assert match.lastgroup is not None
    kind, role, _ = _ENDS[int(match.lastgroup.removeprefix("end"))]
    module: str = match["module"]
    if role in ("down", "up", "up_bias"):
        module += match[f"digit_{role}"] or ""
        part = match[f"part_{role}"]
        module += f"{PART_MARK}{part}" if part else ""
    return module, kind, role


# ---- formats


KeyFormat = Literal["kohya", "diffusers", "peft", "comfyui", "mixed", "unknown"]

_FORMATS: tuple[tuple[KeyFormat, re.Pattern[str]], ...] = (
    ("kohya", re.compile(r"(?:lora|lycoris)_[a-z0-9]+_[^.]+")),
    ("comfyui", re.compile(r"(?:diffusion_model|text_encoders)\..+")),
    ("peft", re.compile(r"base_model\.model\..+")),
    ("diffusers", re.compile(r"(?:unet|transformer|text_encoder(?:_\d)?)\..+")),
)


def key_format(modules: Iterable[str]) -> KeyFormat:
    """Return the key format all modules share; bare names without a prefix are of no format."""
    formats: set[KeyFormat] = {
        next((name for name, pattern in _FORMATS if pattern.fullmatch(module)), "unknown")
        for module in modules
    }
    return formats.pop() if len(formats) == 1 else "mixed"


# ---- layers


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """The rows of a spelt layer, first and end, that one layer of the network has; None: all of them.

    `swapped` says that the two halves of the rows change places.
    """

    key: str
    rows: tuple[int, int] | None = None
    swapped: bool = False


_PREFIX = re.compile(
    r"(?:lora_unet|oft_unet|lora_transformer|lora_prior_unet|lora_dit|lycoris|lora|model_diffusion_model|diffusion_model"
    r"|base_model_model|unet|transformer|denoiser|pipe_dit|dit|model|module|_orig_mod|net|_fsdp_wrapped_module)_"
)
_TEXT_PREFIX = re.compile(
    r"(?:lora_|lycoris_)?(?:te(?P<flat>\d?)"
    r"|text_encoders_(?P<role>clip_[lgh]|t5xxl|\w+?(?=_transformer_)|[a-z0-9]+)"
    r"|text_encoder(?:_(?P<number>\d))?"
    r"|(?P<bare>clip_[lgh]|t5xxl|t5))_(?:transformer_)?"
)
_TEXT_INNER = re.compile(
    r"(?:base_model_model|model|language_model|text_model|transformer|module)_"
)
_OLD_CLIP = re.compile(r"(.+_self_attn)_to_(q|k|v|out)")
_ROLE_NAMES = {"t5": "t5xxl"}


class LayerNames:
    """Finds layers of a base by every spelling that files of any trainer have for them.

    `modules` has the layers of each component ("denoiser", "text_encoder", ...), with the shapes of their
    weights where they are known, by which joined layers are taken apart.
    """

    def __init__(
        self, family: Family, modules: Mapping[str, Mapping[str, Shape] | Sequence[str]]
    ) -> None:
        layers: dict[str, dict[str, Shape]] = {
            component: dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, ())
            for component, names in modules.items()
        }
        self.family, self.layers = family, layers
        self._written: dict[str, LayerRows] = {}
        self._denoiser: dict[str, tuple[LayerRows, ...]] = {}
        self._text: dict[str, dict[str, LayerRows]] = {}
        for component, shapes in layers.items():
            if component == DENOISER:
                self._add_denoiser(shapes)
            else:
                self._text[component] = {
                    flat: LayerRows(key=f"{component}.{name}")
                    for name in shapes
                    for flat in _stripped(_flat(name), _TEXT_INNER)
                }
        self._numbers = {
            component: int(number) if (number := component.rpartition("_")[2]).isdigit() else 1
            for component in self._text
        }

    def _add_denoiser(self, shapes: Mapping[str, Shape]) -> None:
        by_name = {name: (LayerRows(key=f"{DENOISER}.{name}"),) for name in shapes}
        for name, layer in by_name.items():
            self._denoiser.setdefault(_flat(name), layer)
        other = self.family.layer_names(shapes)
        for spelt, names in other.layers.items():
            self._denoiser.setdefault(_flat(spelt), _joined(names, shapes, swapped=other.swapped))
        for name, layer in by_name.items():
            # Old files have the output of an attention without its place in a list of two.
            if name.endswith("to_out.0"):
                self._denoiser.setdefault(_flat(name.removesuffix(".0")), layer)

    def shape(self, key: str) -> Shape:
        """Return the shape of a layer's weight by "component.module", () where it is not known."""
        component, _, name = key.partition(".")
        return self.layers.get(component, {}).get(name, ())

    def find(self, spelling: str, *, size: tuple[int, int] | None = None) -> tuple[LayerRows, ...]:
        """Return the layers that a spelling stands for, in the order of their rows; () for no layer.

        `size` is (out, fan in) of the update, as far as it is known, 0 where not: it tells text
        encoders apart whose layers have the same names, and how the rows of joined layers lie where
        this base is smaller or larger than the releases.
        """
        spelling, _, part = spelling.partition(PART_MARK)
        layers = self._text_layer(spelling, size) or self._denoiser_layer(_flat(spelling))
        if part:
            number = int(part)
            return (LayerRows(key=layers[number].key),) if number < len(layers) else ()
        return _spread(layers, size) if size and len(layers) > 1 else layers

    def _denoiser_layer(self, spelling: str) -> tuple[LayerRows, ...]:
        for candidate in _stripped(spelling, _PREFIX):
            # Old diffusers named the attention processor between the attention and its layer.
            for name in (candidate, candidate.replace("_processor_", "_")):
                if layers := self._denoiser.get(name):
                    return layers
            if candidate.startswith("sformer_blocks_"):  # written by a replacement gone wrong
                return self._denoiser.get(f"tran{candidate}", ())
        return ()

    def _text_layer(self, spelling: str, size: tuple[int, int] | None) -> tuple[LayerRows, ...]:
        flat = _flat(spelling)
        if flat.startswith("base_model_model_"):
            flat = flat.removeprefix("base_model_model_")
        match = _TEXT_PREFIX.match(flat)
        rest = [flat] if match is None else [flat[match.end() :], flat]
        hits = {
            component: layer
            for name in rest
            for component, table in self._text.items()
            if (layer := _in_text(table, name)) is not None
        }
        if match is None and (flat.startswith("lora_") or len(hits) != 1):
            hits = {key: layer for key, layer in hits.items() if self._fits(layer, size)}
            return tuple(hits.values()) if len(hits) == 1 else ()
        if match is not None:
            role = match["role"] or match["bare"]
            if role and (layer_of_role := self._by_role(role, hits)):
                return (layer_of_role,)
            number = int(match["flat"] or match["number"] or 1)
            for component, layer in hits.items():
                if self._numbers[component] == number and not role:
                    return (layer,)
        return tuple(hits.values())[:1]

    def _by_role(self, role: str, hits: Mapping[str, LayerRows]) -> LayerRows | None:
        name = _ROLE_NAMES.get(role, role)
        for component, layer in hits.items():
            if self.family.text.roles.get(component) == name:
                return layer
        return None

    def _fits(self, layer: LayerRows, size: tuple[int, int] | None) -> bool:
        shape = self.shape(layer.key)
        return size is None or len(shape) < 2 or size == (shape[0], math.prod(shape[1:]))


def _flat(name: str) -> str:
    return name.replace(".", "_")


def _stripped(name: str, prefix: re.Pattern[str]) -> Iterator[str]:
    """Yield a name, then with one known prefix after the other taken away."""
    yield name
    while match := prefix.match(name):
        name = name[match.end() :]
        yield name


def _in_text(table: Mapping[str, LayerRows], name: str) -> LayerRows | None:
    for candidate in _stripped(name, _TEXT_INNER):
        if (layer := table.get(candidate)) is not None:
            return layer
        if (old := _OLD_CLIP.fullmatch(candidate)) and (
            layer := table.get(f"{old[1]}_{old[2]}_proj")
        ) is not None:
            return layer
    return None


def _spread(layers: tuple[LayerRows, ...], size: tuple[int, int]) -> tuple[LayerRows, ...]:
    """Return the rows of joined layers in a base of another width, in the same proportion."""
    out, whole = size[0], layers[-1].rows[1] if layers[-1].rows else 0
    if (
        out in (0, whole)
        or not whole
        or any(layer.rows is None or layer.rows[1] * out % whole for layer in layers)
    ):
        return layers
    return tuple(
        LayerRows(key=layer.key, rows=(layer.rows[0] * out // whole, layer.rows[1] * out // whole))
        for layer in layers
        if layer.rows is not None
    )


# ---- writing


def file_endings(format: FileFormat, kind: AdapterKind, *, component: str) -> Mapping[Role, str]:
    """Return the ends of keys that a file of this format has for this kind.

    transformers loads the text encoders' layers and wants magnitudes with `.weight`, diffusers loads the
    others and wants them without.
    """
    if format == "kohya" or kind != "lora":
        return ENDINGS[kind]
    if format == "comfyui":
        # ComfyUI knows the magnitude by LyCORIS's name only.
        return {**PEFT_ENDINGS, "magnitude": ENDINGS["lora"]["magnitude"]}
    if component == DENOISER:
        return PEFT_ENDINGS
    return {**PEFT_ENDINGS, "magnitude": f"{PEFT_ENDINGS['magnitude']}.weight"}


def _joined(
    names: Sequence[str], shapes: Mapping[str, Shape], *, swapped: Set[str]
) -> tuple[LayerRows, ...]:
    """Return the rows of each layer of `names` in the weight that joins them; one layer has the whole weight."""
    if len(names) == 1:
        return (LayerRows(key=f"{DENOISER}.{names[0]}", swapped=names[0] in swapped),)
    joined, start = [], 0
    for name in names:
        end = start + (shapes[name][0] if shapes[name] else 0)
        joined.append(LayerRows(key=f"{DENOISER}.{name}", rows=(start, end)))
        start = end
    return tuple(joined)
