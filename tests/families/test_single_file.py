"""Single-file checkpoints of every U-Net family: recognised, checked, and loaded to the same weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.families.base import PARTS, BaseFacts, Part, TensorInfo
from lora_trainer.families.base_files import base_folder
from lora_trainer.families.base_files.base_folder import read_header
from tests.checkpoint_files import layouts
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.fakes.family_bases import (
    base_of,
    copy_of,
    encoder_of,
    facts_at,
    facts_of,
    image_encoder_of,
    network_of,
)
from tests.fakes.json_files import edit_json
from tests.fakes.ldm_file import unet_tensors, vae_tensors, write_checkpoint

UNETS = [name for name in families.MODULES if families.family(name).denoiser_folder == "unet"]
NAMES = pytest.mark.parametrize("name", UNETS)


def of(name: str) -> Any:
    return families.family(name)


def checkpoint(name: str, folder: Path, **options: Any) -> Path:
    return write_checkpoint(
        base_of(name), folder / f"{name}.safetensors", of(name).texts, **options
    )


def facts_from(
    name: str, file: Path, parts: Iterable[Part] = PARTS, *, companion: Path | None = None
) -> BaseFacts:
    return facts_at(companion or base_of(name), family=name, **dict.fromkeys(parts, file))


def weights_of(facts: BaseFacts) -> dict[str, Tensor]:
    """Load every part and return all weights, named by part."""
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
    """Rewrite a checkpoint with other tensors."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


# ---- whole checkpoints


@NAMES
def test_a_checkpoint_is_the_folder_it_was_made_from(name: str, tmp_path: Path) -> None:
    """Averaged weights beside the trained ones are not used."""
    file = checkpoint(name, tmp_path, ema=True)
    found = {
        other: families.family(other).detect_file(read_header(file)) for other in families.MODULES
    }
    assert found == {other: set(PARTS) if other == name else set() for other in families.MODULES}
    facts = facts_from(name, file)
    assert facts.parts == facts_of(name).parts
    assert_same(weights_of(facts), own_weights(name))
    narrow = facts_from(name, checkpoint(name, tmp_path, dtype=torch.float8_e4m3fn))
    assert_same(
        weights_of(narrow),
        {key: value.to(torch.float8_e4m3fn).float() for key, value in own_weights(name).items()},
    )
    assert {part: files[0] for part, files in of(name).parts(facts.located).items()} == (
        dict.fromkeys(PARTS, file)
    )


# ---- how weights are read


def test_a_folder_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    folder = copy_of("sdxl", tmp_path / "base")
    changed(folder / "unet/diffusion_pytorch_model.safetensors", dict.popitem)
    facts = facts_at(folder)
    with pytest.raises(InputError, match="not that of its config.json"):
        network_of(facts, torch.bfloat16)


def test_a_file_is_mapped_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a float32 file would else lie in memory beside the bf16 weights: 10 of 16 GB for SDXL."""
    part_bytes, mapped, real = 2**12, list[int](), safetensors.safe_open
    file = base_of("sdxl") / "unet/diffusion_pytorch_model.safetensors"
    sizes = [tensor.nbytes for tensor in load_file(file).values()]
    held: list[weakref.ref[Tensor]] = []

    class Counting:
        """`safe_open` that counts what is read through one mapping, and sees whether it was let go."""

        def __init__(self, path: Path, **options: Any) -> None:
            assert not any(each() is not None for each in held), "an earlier mapping is still held"
            self.file = real(path, **options)

        def __enter__(self) -> Counting:
            mapped.append(0)
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self.file.keys())

        def get_tensor(self, key: str) -> Tensor:
            tensor: Tensor = self.file.get_tensor(key)
            mapped[-1] += tensor.nbytes
            held.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(safetensors, "safe_open", Counting)
    monkeypatch.setattr(base_folder, "READ_BYTES", part_bytes)
    network_of(facts_of("sdxl"), torch.bfloat16)
    assert sum(mapped) == sum(sizes) and max(mapped) <= part_bytes + max(sizes)
    assert not any(each() is not None for each in held)


def test_absent_parts_come_from_the_companion(tmp_path: Path) -> None:
    name = "sdxl"
    other = copy_of(name, tmp_path / "other")
    for part in ("vae", "text_encoder"):
        file = next((other / part).glob("*.safetensors"))
        save_file({key: value + 1 for key, value in load_file(file).items()}, file)
    file = checkpoint(name, tmp_path, parts=("denoiser",))
    held = of(name).detect_file(read_header(file))
    assert held == {"denoiser"}
    found = weights_of(facts_from(name, file, held, companion=other))
    for key, value in own_weights(name).items():
        assert torch.equal(found[key], value) == (not key.startswith(("vae.", "text_encoder.")))


@pytest.mark.parametrize(
    ("marks", "velocity", "terminal"),
    [((), False, False), (("v_pred",), True, False), (("v_pred", "ztsnr"), True, True)],
)
def test_markers_say_how_a_checkpoint_was_trained(
    marks: tuple[str, ...], velocity: bool, terminal: bool, tmp_path: Path
) -> None:
    facts = facts_from("sdxl", checkpoint("sdxl", tmp_path, marks=marks))
    assert facts.prediction == ("v_prediction" if velocity else "epsilon")
    assert facts.zero_terminal_snr == terminal
    assert (float(facts.alphas_cumprod()[-1]) == 0) == terminal


@NAMES
def test_a_denoiser_alone_is_read_without_a_prefix(name: str, tmp_path: Path) -> None:
    file = tmp_path / "bare.safetensors"
    tensors = unet_tensors(base_of(name)).items()
    save_file({key.removeprefix("model.diffusion_model."): value for key, value in tensors}, file)
    held = of(name).detect_file(read_header(file))
    assert held == {"denoiser"}
    assert_same(weights_of(facts_from(name, file, held)), own_weights(name))


# ---- a VAE alone


def deprecated(name: str) -> str:
    """Return the name that a VAE's tensor had in diffusers before 0.17."""
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for new, former in old.items():
        name = name.replace(f"attentions.0.{new}.", f"attentions.0.{former}.")
    return name


@pytest.mark.parametrize("layout", ["ldm", "prefixed", "diffusers", "deprecated"])
def test_a_vae_file_replaces_the_base_s_own(layout: str, tmp_path: Path) -> None:
    name = "sd2"
    own = load_file(base_of(name) / "vae/diffusion_pytorch_model.safetensors")
    tensors = {
        "ldm": {**vae_tensors(base_of(name)), "loss.logvar": torch.zeros(1)},
        "prefixed": {f"first_stage_model.{k}": v for k, v in vae_tensors(base_of(name)).items()},
        "diffusers": own,
        "deprecated": {deprecated(key): value for key, value in own.items()},
    }[layout]
    file = tmp_path / "vae.safetensors"
    save_file({key: value.half().contiguous() for key, value in tensors.items()}, file)
    assert of(name).detect_file(read_header(file)) == {"vae"}
    facts = facts_from(name, file, ["vae"])
    assert facts.parts == facts_of(name).parts
    wanted = {
        key: value.half().float() if key.startswith("vae.") else value
        for key, value in own_weights(name).items()
    }
    assert_same(weights_of(facts), wanted)
    assert image_encoder_of(facts).vae.dtype == torch.float32


def test_a_vae_of_another_family_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "vae.safetensors"
    tensors = vae_tensors(base_of("sd15"))
    tensors["decoder.conv_in.weight"] = torch.zeros(8, 16, 3, 3)
    save_file(tensors, file)
    assert of("sd15").detect_file(read_header(file)) == set()
    with pytest.raises(InputError, match=r"channels \(16, 8\); the base model's has \(4, 8\)"):
        facts_from("sd15", file, ["vae"])
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(InputError, match="holds no VAE"):
        facts_from("sd15", file, ["vae"])


# ---- what is no base


TELLING = (
    "input_blocks.0.0.weight",
    "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight",
    "input_blocks.1.1.proj_in.weight",
    "label_emb.0.0.weight",
    "first_stage_model.decoder.conv_in.weight",
    "first_stage_model.encoder.conv_in.weight",
    "conv_in.weight",
    "add_embedding.linear_1.weight",
)


@given(
    st.dictionaries(
        st.sampled_from([*TELLING, *(f"model.diffusion_model.{each}" for each in TELLING)]),
        st.lists(st.integers(0, 9), max_size=5).map(tuple),
    )
)
def test_any_header_is_told_without_an_error(shapes: Mapping[str, tuple[int, ...]]) -> None:
    header = {name: TensorInfo(dtype="F16", shape=shape) for name, shape in shapes.items()}
    taken = [name for name in UNETS if "denoiser" in of(name).detect_file(header)]
    assert len(taken) <= 1


# ---- checkpoints that do not fit


@NAMES
def test_a_missing_tensor_is_refused(name: str, tmp_path: Path) -> None:
    """Of the text encoder before anything is loaded, of the other parts while they are."""
    file = checkpoint(name, tmp_path)
    text = next(key for key in read_header(file) if key.endswith("token_embedding.weight"))
    changed(file, lambda tensors: tensors.pop(text))
    with pytest.raises(InputError, match="text_encoder in"):
        facts_from(name, file)
    for key, message, load in (
        ("model.diffusion_model.out.2.bias", "the denoiser in", network_of),
        ("first_stage_model.encoder.conv_out.bias", "the vae in", image_encoder_of),
    ):
        changed(checkpoint(name, tmp_path), lambda tensors, key=key: tensors.pop(key))
        facts = facts_from(name, file)
        with pytest.raises(InputError, match=message) as caught:
            load(facts)
        assert "\n" not in str(caught.value)


def test_a_released_u_net_that_lacks_tensors_is_refused_before_loading(tmp_path: Path) -> None:
    companion = copy_of("sdxl", tmp_path / "base")
    edit_json(companion / "unet/config.json", **of("sdxl").published[0].architecture)
    file = write(Case("without biases", layouts.network("sdxl")), tmp_path)
    with pytest.raises(InputError, match="parameters, its companion's in .* 2,567,463,684"):
        facts_from("sdxl", file, ["denoiser"], companion=companion)


def test_another_companion_is_named(tmp_path: Path) -> None:
    file = checkpoint("sd15", tmp_path)
    wrong = copy_of("sd15", tmp_path / "wrong")
    for config, key, value in (
        ("unet/config.json", "cross_attention_dim", 24),
        ("unet/config.json", "use_linear_projection", True),
        ("text_encoder/config.json", "num_hidden_layers", 5),
    ):
        whole = (wrong / config).read_text()
        edit_json(wrong / config, **{key: value})
        with pytest.raises(InputError, match="its companion's in .*wrong") as caught:
            facts_from("sd15", file, companion=wrong)
        assert "base.companion" in str(caught.value.fix)
        (wrong / config).write_text(whole)


def test_scaled_fp8_is_read_to_its_values(tmp_path: Path) -> None:
    """ComfyUI's names of the scale, former and present; one number or one a row; norms unscaled."""

    def scale(tensors: dict[str, Tensor]) -> None:
        matrices = [key for key in tensors if key.endswith(".weight") and tensors[key].dim() > 1]
        for number, key in enumerate(matrices):
            whole, stem = tensors[key].float(), key.removesuffix("weight")
            rows = whole.flatten(1).abs().amax(1) if number % 2 else whole.abs().max()
            factor = (rows / 448).clamp(min=1e-6)
            shaped = factor.reshape(-1, *[1] * (whole.dim() - 1))
            tensors[key] = (whole / shaped).to(torch.float8_e4m3fn)
            tensors[f"{stem}{('scale_weight', 'weight_scale')[number // 2 % 2]}"] = factor
            wanted[key] = tensors[key].float() * shaped
        tensors["model.diffusion_model.scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)

    name, wanted = "sdxl", dict[str, Tensor]()
    plain = checkpoint(name, tmp_path)
    tensors = load_file(plain)
    scale(tensors)
    scaled, values = tmp_path / "scaled.safetensors", tmp_path / "values.safetensors"
    save_file(tensors, scaled)
    save_file({**load_file(plain), **wanted}, values)
    assert_same(weights_of(facts_from(name, scaled)), weights_of(facts_from(name, values)))
