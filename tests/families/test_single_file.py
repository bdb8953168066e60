"""Bases in single files, of all parts or of some: recognised, checked, and loaded to the weights that stand in them."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import fp32_parts
from lora_trainer.families.files.locate import describe, with_choices
from lora_trainer.families.files.weight_files import read_header
from tests.checkpoint_files import layouts
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.fakes.family_bases import (
    base_of,
    copy_of,
    denoiser_of,
    edit_json,
    encoder_of,
    facts_at,
    facts_of,
    image_encoder_of,
    network_of,
    pipeline_of,
)
from tests.fakes.ldm_file import PARTS, unet_tensors, vae_tensors, write_checkpoint
from tests.fakes.original_names import NORMS, original_names, split_at

UNETS = [name for name in families.NAMES if families.family(name).traits.folder == "unet"]
TRANSFORMERS = pytest.mark.parametrize("name", NORMS)
PREFIX, FP8 = "model.diffusion_model.", torch.float8_e4m3fn
UNET_FILE = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(autouse=True)
def tiny_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    split_at(monkeypatch, inner=32)


def of(name: str) -> Any:
    return families.family(name)


def parts_in(name: str, file: Path) -> Any:
    return of(name).detect_file(read_header(file))


def original(name: str) -> dict[str, Tensor]:
    return original_names(name, denoiser_of(name).state_dict())


def written(tensors: Mapping[str, Tensor], file: Path) -> Path:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    return file


def checkpoint(name: str, folder: Path, **options: Any) -> Path:
    """Write all parts of a tiny base into one file; CLIP-L's projection is in no file of Stable Diffusion 3."""
    base, file = base_of(name), folder / f"{name}.safetensors"
    if name in UNETS:
        return write_checkpoint(base, file, of(name).text, **options)
    tensors = {PREFIX + key: tensor for key, tensor in original(name).items()}
    tensors |= {f"first_stage_model.{key}": tensor for key, tensor in vae_tensors(base).items()}
    for component, role in of(name).text.roles.items():
        state = load_file(base / component / "model.safetensors")
        tensors |= {f"text_encoders.{role}.transformer.{key}": each for key, each in state.items()}
    del tensors["text_encoders.clip_l.transformer.text_projection.weight"]
    return written(tensors, file)


def weights_of(facts: BaseFacts) -> dict[str, Tensor]:
    """Load every part, frozen, and return all weights, named by part."""
    networks = {
        "denoiser": network_of(facts),
        "vae": image_encoder_of(facts).vae,
        **encoder_of(facts).networks,
    }
    for part, network in networks.items():
        assert not any(p.requires_grad for p in network.parameters()), part
        assert not network.training, part
    return {
        f"{part}.{key}": value
        for part, network in networks.items()
        for key, value in network.state_dict().items()
    }


@cache
def own_weights(name: str) -> Mapping[str, Tensor]:
    """Return all weights of a family's tiny base, loaded from its folder."""
    return weights_of(facts_of(name))


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    different = [key for key in wanted if not torch.equal(found[key], wanted[key])]
    assert not different


def changed(file: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Rewrite a file with other tensors."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return file


# ---- all parts in one file


@pytest.mark.parametrize("name", [*UNETS, "sd3"])
def test_a_checkpoint_is_the_folder_it_was_made_from(name: str, tmp_path: Path) -> None:
    """Averaged weights beside the trained ones are not used; its companion has configurations only."""
    file = checkpoint(name, tmp_path, ema=True)
    whole = PARTS[:2] if name == "sd3" else PARTS  # whose encoders count one by one
    assert parts_in(name, file) == set(whole)
    takers = [each for each in families.NAMES if "denoiser" in parts_in(each, file)]
    assert takers == [name]
    companion, own = copy_of(name, tmp_path / "companion"), facts_of(name)
    for weight in companion.rglob("*.safetensors"):
        weight.unlink()
    facts = facts_at(companion, family=name, **dict.fromkeys(PARTS, file))
    for part in whole:
        assert facts.parts[part] == own.parts[part]
    assert (facts.release.variant, facts.release.max_tokens) == (
        own.release.variant,
        own.release.max_tokens,
    )
    assert_same(weights_of(facts), own_weights(name))
    assert {part: files[0] for part, files in of(name).parts(facts.located).items()} == (
        dict.fromkeys(PARTS, file)
    )
    if name == "sdxl":  # the order is a part of the identity
        texts = [path.name for path in of(name).parts(facts.located)["text_encoder"]]
        assert texts[:4] == [file.name, "config.json", "config.json", "tokenizer.json"]
        texts = [path.name for path in of(name).parts(own.located)["text_encoder"]]
        assert texts[:4] == 2 * ["model.safetensors"] + 2 * ["config.json"]
    if name == "sd3":
        assert pipeline_of(facts).text_encoder_3 is not None
        return
    checkpoint(name, tmp_path, dtype=FP8)
    narrow = facts_at(companion, family=name, **dict.fromkeys(PARTS, file))
    assert_same(
        weights_of(narrow), {key: value.to(FP8).float() for key, value in own_weights(name).items()}
    )


def test_other_files_are_not_taken_for_a_base(tmp_path: Path) -> None:
    """Another family's checkpoint has a VAE of the same shape, with other weights."""
    whole, detect = read_header(checkpoint("sd3", tmp_path)), of("sd3").detect_file
    vae = {name: info for name, info in whole.items() if name.startswith("first_stage_model.")}
    other = SimpleNamespace(dtype="F32", shape=(8, 8))
    beside = {**vae, f"{PREFIX}double_blocks.0.weight": other}
    assert detect(vae) == {"vae"} and not detect(beside)
    assert all(of(name).detect_file(beside) == {"vae"} for name in ("chroma", "lumina2", "zimage"))
    inpainting = SimpleNamespace(dtype="F32", shape=(16, 33, 2, 2))
    assert "denoiser" not in detect({**whole, f"{PREFIX}x_embedder.proj.weight": inpainting})
    odd = {"conv_in.weight": SimpleNamespace(dtype="F16", shape=(4,))}
    assert families.detect_file(odd | {"label_emb.0.0.weight": other}) is None


@pytest.mark.parametrize("marks", [(), ("v_pred",), ("v_pred", "ztsnr")])
def test_absent_parts_come_from_the_companion_and_markers_say_how_it_was_trained(
    marks: tuple[str, ...], tmp_path: Path
) -> None:
    other = copy_of("sdxl", tmp_path / "other")
    for part in ("vae", "text_encoder"):
        file = next((other / part).glob("*.safetensors"))
        save_file({key: value + 1 for key, value in load_file(file).items()}, file)
    file = checkpoint("sdxl", tmp_path, parts=("denoiser",), marks=marks)
    assert parts_in("sdxl", file) == {"denoiser"}
    facts = facts_at(other, denoiser=file)
    assert facts.release.prediction == ("v_prediction" if marks else "epsilon")
    assert (
        facts.release.zero_terminal_snr
        == (float(facts.release.alphas_cumprod()[-1]) == 0)
        == ("ztsnr" in marks)
    )
    found = weights_of(facts)
    for key, value in own_weights("sdxl").items():
        assert torch.equal(found[key], value) == (not key.startswith(("vae.", "text_encoder.")))


# ---- a denoiser alone


def test_a_u_net_alone_is_read_without_a_prefix(tmp_path: Path) -> None:
    tensors = unet_tensors(base_of("sdxl")).items()
    bare = {key.removeprefix(PREFIX): value for key, value in tensors}
    file = written(bare, tmp_path / "bare.safetensors")
    assert parts_in("sdxl", file) == {"denoiser"}
    assert_same(weights_of(facts_at(base_of("sdxl"), denoiser=file)), own_weights("sdxl"))
    named = load_file(base_of("sdxl") / UNET_FILE) | {"conv_in.foreign": torch.zeros(1)}
    with pytest.raises(InputError, match=r"Unexpected key.* \"conv_in\.foreign\""):
        network_of(facts_at(base_of("sdxl"), denoiser=written(named, file)))


@pytest.mark.parametrize(("prefix", "dtype"), [("", FP8), (PREFIX, torch.float32)])
@TRANSFORMERS
def test_a_file_of_the_release_holds_the_same_denoiser(
    name: str, prefix: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A file of the denoiser alone, and one that has parts of other encoders too."""
    wanted = denoiser_of(name).state_dict()
    tensors = {prefix + key: t.to(dtype) for key, t in original_names(name, wanted).items()}
    if prefix:
        tensors["text_encoders.t5xxl.shared.weight"] = torch.zeros(9, 9)
    file = written(tensors, tmp_path / f"{name}-base.safetensors")
    facts = facts_at(base_of(name), source=str(file), family=name, denoiser=file)
    assert families.detect_file(read_header(file)) == (families.family(name), {"denoiser"})
    assert facts.parts == facts_of(name).parts
    if name == "lumina2":
        return  # diffusers' conversion of it knows the release's width only
    network = network_of(facts, torch.bfloat16)
    fp32 = fp32_parts(network)
    assert_same(
        dict(sorted(network.state_dict().items())),
        {
            key: tensor.to(dtype).to(
                torch.bfloat16 if set(fp32).isdisjoint(key.split(".")) else torch.float32
            )
            for key, tensor in sorted(wanted.items())
        },
    )


def test_a_pruned_file_is_as_deep_as_it_is(tmp_path: Path) -> None:
    tensors = denoiser_of("qwen").state_dict()
    kept = {key: t for key, t in tensors.items() if not key.startswith("transformer_blocks.1.")}
    facts = facts_at(base_of("qwen"), denoiser=written(kept, tmp_path / "pruned.safetensors"))
    assert facts.release.architecture["num_layers"] == 1
    assert network_of(facts).state_dict().keys() == kept.keys()


# ---- a VAE alone


def deprecated(name: str) -> str:
    """Return the name that a VAE's tensor had in diffusers before 0.17."""
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for new, former in old.items():
        name = name.replace(f"attentions.0.{new}.", f"attentions.0.{former}.")
    return name


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("sd2", "diffusers"),
        ("sd2", "deprecated"),
        ("sd2", ""),
        ("flux", "vae."),
        ("sd3", "first_stage_model."),
    ],
)
def test_a_vae_file_replaces_the_base_s_own(name: str, layout: str, tmp_path: Path) -> None:
    """In diffusers' names, present and former, or in those of the latent diffusion code behind a prefix."""
    own = load_file(base_of(name) / "vae/diffusion_pytorch_model.safetensors")
    ldm = {layout + key: value for key, value in vae_tensors(base_of(name)).items()}
    former = {deprecated(key): value for key, value in own.items()}
    tensors = {"diffusers": own, "deprecated": former}.get(
        layout, ldm | {f"{layout}loss.logvar": torch.zeros(1)}
    )
    half = {key: value.half() for key, value in tensors.items()}
    file = written(half, tmp_path / "vae.safetensors")
    assert parts_in(name, file) == {"vae"}
    facts = facts_at(base_of(name), vae=file)
    assert facts.parts == facts_of(name).parts
    wanted = {
        key: value.half().float() if key.startswith("vae.") else value
        for key, value in own_weights(name).items()
    }
    assert_same(weights_of(facts), wanted)


def test_a_vae_of_another_family_is_refused(tmp_path: Path) -> None:
    """FLUX.2's cannot be read at all: its statistics are in no file that others write."""
    tensors = vae_tensors(base_of("sd15")) | {"decoder.conv_in.weight": torch.zeros(8, 16, 3, 3)}
    file = written(tensors, tmp_path / "vae.safetensors")
    assert parts_in("sd15", file) == set()
    with pytest.raises(InputError, match=r"channels \(16, 8\); the base model's has \(4, 8\)"):
        facts_at(base_of("sd15"), vae=file)
    written({"a": torch.zeros(1)}, file)
    with pytest.raises(InputError, match="holds no VAE"):
        facts_at(base_of("sd15"), vae=file)
    assert not parts_in("flux2", written(vae_tensors(base_of("flux2")), file))


WAN = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "decoder.mid_block.resnets.0.norm1": "decoder.middle.0.residual.0",
}
"""diffusers' names of some modules -> those of Wan, the video model that Qwen-Image's VAE comes from."""


def wan_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    return f"{WAN.get(module, module)}.{kind}"


@pytest.mark.parametrize("renamed", [str, wan_name], ids=["diffusers", "wan"])
def test_a_video_vae_in_a_file_gives_what_its_folder_gives(renamed: Any, tmp_path: Path) -> None:
    """The VAE has the release's depth: the other names depend on it."""
    folder, file = copy_of("qwen", tmp_path / "base"), tmp_path / "vae.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderKLQwenImage(base_dim=4)
    vae.save_pretrained(folder / "vae")
    save_file({renamed(name): tensor for name, tensor in vae.state_dict().items()}, file)
    assert parts_in("qwen", file) == {"vae"}
    whole, facts = facts_at(folder), facts_at(folder, vae=file)
    assert facts.parts["vae"] == whole.parts["vae"] and facts.vae_factor == 8
    assert_same(image_encoder_of(facts).vae.state_dict(), vae.state_dict())


# ---- text encoders in files of their own


@TRANSFORMERS
def test_encoders_are_found_by_what_they_are(name: str, tmp_path: Path) -> None:
    """Their files have names that say nothing, the last encoder comes first."""
    base, family = base_of(name), families.family(name)
    sources = [next((base / each).glob("*.safetensors")) for each in reversed([*family.text.roles])]
    files = [
        str(shutil.copy(source, tmp_path / f"{number}.safetensors"))
        for number, source in enumerate(sources)
    ]
    if (
        name == "lumina2"
    ):  # ComfyUI's names begin with `model.`, and the tokenizer's model is a tensor of bytes
        named = {f"model.{key}": tensor for key, tensor in load_file(files[0]).items()}
        save_file({**named, "spiece_model": torch.zeros(9, dtype=torch.uint8)}, files[0])
    facts = describe(BaseSettings(model=str(base), text_encoders=tuple(files)))
    assert {str(path) for path in facts.located.text.values()} == set(files)
    assert facts.parts == facts_of(name).parts
    assert set(files) <= set(map(str, family.parts(facts.located)["text_encoder"]))
    assert_same(weights_of(facts), own_weights(name))


def test_a_file_that_is_no_encoder_of_the_family_is_named() -> None:
    vae = base_of("flux") / "vae" / "diffusion_pytorch_model.safetensors"
    (qwen,) = (base_of("zimage") / "text_encoder").glob("*.safetensors")
    for name, file, said in (
        ("flux", vae, "is not a text encoder; family flux has clip_l, t5xxl"),
        ("flux", qwen, "is the text encoder Qwen3.*family flux has clip_l, t5xxl"),
        ("sdxl", qwen, "family sdxl reads its text encoders from a checkpoint"),
    ):
        with pytest.raises(InputError, match=said):
            describe(BaseSettings(model=str(base_of(name)), text_encoders=(str(file),)))


# ---- how weights are read


def test_a_file_is_mapped_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a float32 file would else lie in memory beside the bf16 weights: 10 of 16 GB for SDXL."""
    part_bytes, mapped, real = 2**12, list[int](), safetensors.safe_open
    sizes = [tensor.nbytes for tensor in load_file(base_of("sdxl") / UNET_FILE).values()]
    held: list[weakref.ref[Tensor]] = []

    @contextmanager
    def counting(path: Path, **options: Any) -> Iterator[Any]:
        """`safe_open` that counts what is read through one mapping, and sees whether it was let go."""
        assert not any(each() is not None for each in held), "an earlier mapping is still held"
        mapped.append(0)

        def get_tensor(key: str) -> Tensor:
            tensor: Tensor = file.get_tensor(key)
            mapped[-1] += tensor.nbytes
            held.append(weakref.ref(tensor))
            return tensor

        with real(path, **options) as file:
            yield SimpleNamespace(keys=file.keys, get_tensor=get_tensor)

    module = "lora_trainer.families.files.weight_files"
    monkeypatch.setattr(f"{module}.safe_open", counting)
    monkeypatch.setattr(f"{module}.READ_BYTES", part_bytes)
    network_of(facts_of("sdxl"), torch.bfloat16)
    assert sum(mapped) == sum(sizes) and max(mapped) <= part_bytes + max(sizes)
    assert not any(each() is not None for each in held)


def test_a_conversion_takes_the_only_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The matrix of query, key and value would else lie beside the three that are made from it."""
    file = written(original("flux"), tmp_path / "flux.safetensors")
    functions = SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]
    convert = functions["checkpoint_mapping_fn"]

    def counting(checkpoint: dict[str, Tensor], **options: Any) -> Any:
        joined = weakref.ref(checkpoint["double_blocks.0.img_attn.qkv.weight"])
        converted = convert(checkpoint=checkpoint, **options)
        assert joined() is None
        return converted

    monkeypatch.setitem(functions, "checkpoint_mapping_fn", counting)
    network_of(facts_at(base_of("flux"), denoiser=file))


def test_a_folder_is_not_held_beside_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(network: Any, _: torch.device) -> Any:
        storage = weakref.ref(network.x_embedder.weight.untyped_storage())
        del network.x_embedder.weight
        assert storage() is None
        return network

    monkeypatch.setattr(torch.nn.Module, "to", move)
    network_of(facts_of("flux"), torch.bfloat16)


def test_scaled_fp8_is_read_to_its_values(tmp_path: Path) -> None:
    """ComfyUI's names of the scale, former and present; one number or one a row; norms unscaled."""
    plain = load_file(checkpoint("sdxl", tmp_path))
    scaled, values = dict(plain), dict(plain)
    matrices = [key for key in plain if key.endswith(".weight") and plain[key].dim() > 1]
    for number, key in enumerate(matrices):
        whole, stem = plain[key].float(), key.removesuffix("weight")
        rows = whole.flatten(1).abs().amax(1) if number % 2 else whole.abs().max()
        factor = (rows / 448).clamp(min=1e-6)
        shaped = factor.reshape(-1, *[1] * (whole.dim() - 1))
        scaled[key] = (whole / shaped).to(FP8)
        scaled[f"{stem}{('scale_weight', 'weight_scale')[number // 2 % 2]}"] = factor
        values[key] = scaled[key].float() * shaped
    scaled[f"{PREFIX}scaled_fp8"] = torch.zeros(2).to(FP8)
    files = written(scaled, tmp_path / "scaled"), written(values, tmp_path / "values")
    read, wanted = (
        weights_of(facts_at(base_of("sdxl"), family="sdxl", **dict.fromkeys(PARTS, file)))
        for file in files
    )
    assert_same(read, wanted)
    blocks = f"{PREFIX}input_blocks.0.0.scale_weight"
    file = written(scaled | {blocks: torch.ones(2, 1)}, tmp_path / "blocks")
    with pytest.raises(InputError, match=r"fp8 in blocks \(.*input_blocks\.0\.0\.scale_weight is"):
        network_of(facts_at(base_of("sdxl"), denoiser=file))


def test_gguf_is_read_to_its_values(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="optional: only GGUF bases need it")
    from gguf.quants import dequantize, quantize

    file, kind = tmp_path / "flux.gguf", gguf.GGMLQuantizationType.Q8_0
    writer, values = gguf.GGUFWriter(str(file), "flux"), original("flux")
    for key, tensor in [*values.items()]:
        if key.endswith("weight") and tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            packed = quantize(tensor.numpy(), kind)
            writer.add_tensor(key, packed, raw_dtype=kind)
            values[key] = torch.from_numpy(dequantize(packed, kind))
        else:
            writer.add_tensor(key, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = written(values, tmp_path / "plain.safetensors")
    facts, expected = (facts_at(base_of("flux"), denoiser=each) for each in (file, plain))
    assert facts.parts["denoiser"] == expected.parts["denoiser"]
    wanted = network_of(expected).state_dict()
    assert any(
        not torch.equal(wanted[key], t) for key, t in denoiser_of("flux").state_dict().items()
    )
    for key, tensor in network_of(facts).state_dict().items():
        torch.testing.assert_close(tensor, wanted[key], rtol=1e-3, atol=1e-4)
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(InputError, match="not a whole GGUF file .* its header says"):
        read_header(file)


def test_a_gguf_says_which_prediction_is_assumed(tmp_path: Path) -> None:
    case = Case("SD 2 GGUF", layouts.network("sd2"), "sd2", dtype="Q8_0", file="sd2.gguf")
    settings = BaseSettings(model=str(write(case, tmp_path)))
    facts = describe(settings)
    assert facts.release.prediction == "v_prediction"
    predicted = next(each for each in facts.release.assumed if each.key == "base.prediction")
    assert "assumed: v_prediction" in predicted.sentence
    assert "base.prediction=epsilon" in predicted.advice
    chosen = settings.model_copy(update={"prediction": "epsilon"})
    facts = with_choices(facts, chosen, zero_terminal_snr="auto")
    assert facts.release.prediction == "epsilon"
    assert [each.key for each in facts.release.assumed] == ["base.distilled"]


# ---- what does not fit


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    """Of the text encoder before anything is loaded, of the other parts while they are."""
    for key, message, load in (
        ("conditioner.embedders.0.transformer.", "text_encoder in", encoder_of),
        (f"{PREFIX}out.2.bias", "the denoiser in", network_of),
        ("first_stage_model.encoder.conv_out.bias", "the vae in", image_encoder_of),
    ):
        file = checkpoint("sdxl", tmp_path)
        name = next(name for name in load_file(file) if name.startswith(key))
        changed(file, lambda tensors, name=name: tensors.pop(name))  # type: ignore[misc]  # a default in a lambda
        with pytest.raises(InputError, match=message) as caught:
            load(facts_at(base_of("sdxl"), family="sdxl", **dict.fromkeys(PARTS, file)))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "file", "tensor", "said"),
    [
        ("sdxl", UNET_FILE, "conv_out.bias", "not that of its config.json"),
        ("sdxl", "text_encoder_2/{}", "layers.0.mlp.fc1.bias", "lacks 1 tensors, first .*{}"),
        ("flux", "transformer/{}", "x_embedder.bias", "not that of its config.json.*{}"),
        ("flux", "vae/{}", "decoder.conv_in.bias", "lacks 1 tensors, first .*{}"),
        ("flux", "text_encoder_2/{}", "encoder.final_layer_norm.weight", "lacks 1 tensors, first .*{}"),
    ],
)  # fmt: skip
def test_a_tensor_that_a_folder_lacks_is_never_made_up(
    name: str, file: str, tensor: str, said: str, tmp_path: Path
) -> None:
    folder = copy_of(name, tmp_path / "base")
    (path,) = (folder / file).parent.glob("*.safetensors")
    changed(path, lambda tensors: tensors.pop(next(each for each in tensors if tensor in each)))
    load = {"vae": image_encoder_of, "text_encoder_2": encoder_of}.get(path.parent.name, network_of)
    with pytest.raises(InputError, match=said.format(tensor)):
        load(facts_at(folder))


def test_foreign_tensors_of_a_folder_are_left_out_and_quantised_ones_refused(
    tmp_path: Path,
) -> None:
    folder = copy_of("flux", tmp_path / "base")
    (path,) = (folder / "transformer").glob("*.safetensors")
    whole = load_file(path)
    save_file(whole | {"foreign.weight": torch.zeros(1)}, path)
    assert_same(network_of(facts_at(folder)).state_dict(), denoiser_of("flux").state_dict())
    int8 = {"x_embedder.weight": whole["x_embedder.weight"].to(torch.int8)}
    for quantised in (int8, {"x_embedder.SCB": torch.zeros(1)}):
        save_file(whole | quantised, path)
        with pytest.raises(InputError, match="is quantised"):
            facts_at(folder)


def test_a_released_u_net_that_lacks_tensors_is_refused_before_loading(tmp_path: Path) -> None:
    companion = copy_of("sdxl", tmp_path / "base")
    edit_json(companion / "unet/config.json", **of("sdxl").published[0].architecture)
    file = write(Case("without biases", layouts.network("sdxl")), tmp_path)
    with pytest.raises(InputError, match="parameters, its companion's in .* 2,567,463,684"):
        facts_at(companion, denoiser=file)


def test_another_companion_is_named(tmp_path: Path) -> None:
    """A transformer's before anything is loaded where the companion is a release, else while loading."""
    file, wrong = checkpoint("sd15", tmp_path), copy_of("sd15", tmp_path / "wrong")
    for config, key, value in (
        ("unet/config.json", "cross_attention_dim", 24),
        ("unet/config.json", "use_linear_projection", True),
        ("text_encoder/config.json", "num_hidden_layers", 5),
    ):
        whole = (wrong / config).read_text()
        edit_json(wrong / config, **{key: value})
        with pytest.raises(InputError, match="its companion's in .*wrong") as caught:
            facts_at(wrong, family="sd15", **dict.fromkeys(PARTS, file))
        assert "base.companion" in str(caught.value.fix)
        (wrong / config).write_text(whole)
    table = "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"
    changed(file, lambda tensors: tensors.update({table: tensors[table].repeat(2, 1)}))
    with pytest.raises(InputError, match=r"text encoder in .*token_embedding\.weight.*Size"):
        encoder_of(facts_at(base_of("sd15"), family="sd15", **dict.fromkeys(PARTS, file)))
    tensors = original("flux2") | {"txt_in.weight": torch.zeros(8, 96)}
    file, folder = written(tensors, tmp_path / "klein"), copy_of("flux2", tmp_path / "base")
    with pytest.raises(InputError, match="not that of its companion") as caught:
        network_of(facts_at(folder, denoiser=file))
    assert "base.companion" in caught.value.fix
    edit_json(folder / "transformer" / "config.json", **of("flux2").published[2].architecture)
    edit_json(folder / "text_encoder" / "config.json", hidden_size=4096)
    with pytest.raises(InputError, match="parameters, its companion's in .* 9,078,581,248"):
        facts_at(folder, denoiser=file)
