"""Filling the caches with real encoders: each thing once, again only if what it depends on changed."""

from __future__ import annotations

import threading
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, CLIPTokenizer

from lora_trainer.cache import encode
from lora_trainer.cache.encode import fill
from lora_trainer.cache.store import Cache
from lora_trainer.common.errors import InputError, StoppedBySignal
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import cut
from lora_trainer.dataset.images import decode
from tests.fakes.studio import PROMPT, Studio, draw, studio_in


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    return studio_in(tmp_path)


TEXTS = ["", PROMPT, *(f"image number {index}" for index in range(3))]


def test_a_cold_run_encodes_each_once_and_a_warm_one_nothing(studio: Studio) -> None:
    for suffix, original in ((".png", "p0.png"), (".txt", "p2.txt")):
        (studio.folder / f"copy{suffix}").write_bytes((studio.folder / original).read_bytes())
    assert studio.work() == (3, sorted(TEXTS)), "equal images and equal captions once"
    phases = [event.fields for event in studio.events if event.kind == "phase"]
    assert {phase["total"] for phase in phases} == {8}
    begun = {phase["message"]: phase["done"] for phase in phases if "loading" in phase["message"]}
    assert begun == {"loading the image encoder": 0, "loading the text encoders": 3}
    counted = [phase["done"] for phase in phases if phase["message"] not in begun]
    assert counted == list(range(9)), "told item by item"
    done, *encoders = studio.encode()
    assert encoders == [None, None], "a warm run loads no encoder"
    assert done == {"latents": 0, "texts": 0, "masks": 0, "found": 8}


def test_no_text_costs_a_look_at_all_others(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at, real = [], encode._encode_texts

    def encoded(jobs: Any, *others: Any) -> Any:
        looked_at.append(len(jobs))
        return real(jobs, *others)

    monkeypatch.setattr(encode, "_encode_texts", encoded)
    monkeypatch.setattr(encode, "MOST_TOGETHER", 2)
    assert studio.work() == (3, sorted(TEXTS))
    # This encoder takes one at a time. With all that wait in each list 100,000 texts took hours.
    assert looked_at == [2, 2, 2, 2, 1]


def test_every_resolution_has_its_latents_and_is_told_its_own_size(studio: Studio) -> None:
    studio.encode()
    studio.more_px = (24, 32)
    assert studio.work() == (6, []), "what was there is not encoded again"
    source = next(iter(studio.needs().sources.values()))
    at_all = (source, *source.others)
    sizes = [at.size_px for at in at_all]
    assert len(set(sizes)) == 3
    shapes = []
    for at in at_all:
        (view,) = at.views
        entry = studio.cache.read(view.latents)
        assert entry is not None
        shapes.append((2 * entry["mean"].shape[2], 2 * entry["mean"].shape[1]))
        placed = next(job for job in studio.needs().images.values() if job.key == view.latents)
        corner = (placed.placement.left_px, placed.placement.top_px)
        assert view.geometry["corner"].tolist() == [list(corner)]
    assert shapes == sizes


def test_an_entry_holds_what_diffusers_and_transformers_give(studio: Studio) -> None:
    """Images plain, mirrored and cut; scaled for the denoiser."""
    studio.settings = DataSettings(flip=True)
    wanted = studio.needs()
    assert studio.encode(wanted)[0]["latents"] == 6
    vae = AutoencoderKL.from_pretrained(studio.base, subfolder="vae")
    for job in wanted.images.values():
        picture = Image.open(job.record.path).convert("RGB")
        pixels = np.asarray(cut(picture, job.placement, flip=False), dtype=np.float32)
        pixels = pixels[:, ::-1] if job.flip else pixels
        tensor = torch.tensor(pixels.copy()).permute(2, 0, 1)[None] / 255 * 2 - 1
        with torch.no_grad():
            posterior = vae.encode(tensor).latent_dist
        entry = studio.cache.read(job.key)
        assert entry is not None
        for name, value in (("mean", posterior.mean), ("std", posterior.std)):
            expected = (value[0] * 0.5).numpy()
            np.testing.assert_allclose(entry[name], expected, rtol=1e-4, atol=1e-5)
    tokenizer = CLIPTokenizer.from_pretrained(studio.base, subfolder="tokenizer")
    encoder = CLIPTextModel.from_pretrained(studio.base, subfolder="text_encoder")
    ids = tokenizer(PROMPT, padding="max_length", max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = encoder(ids)[0].numpy()
    entry = studio.cache.read(studio.texts_as().key(PROMPT))
    assert entry is not None and entry["text"].shape == (1, 77, 16)
    np.testing.assert_allclose(entry["text"], expected, rtol=1e-5, atol=1e-6)


def test_texts_of_a_trained_encoder_are_kept_as_tokens(studio: Studio) -> None:
    studio.encode()
    studio.tokens_only = True
    done, _, encoder = studio.encode()
    assert encoder is not None and (done["texts"], encoder.calls["embed"]) == (5, [])
    entry = studio.cache.read(studio.texts_as().key(PROMPT))
    assert entry is not None
    tokens = {name: torch.from_numpy(array) for name, array in entry.items()}
    assert {tensor.dtype for tensor in tokens.values()} == {torch.int64}
    with torch.no_grad():
        run = encoder.embed(tokens)
    for name, tensor in encoder.encode_prompts([PROMPT]).items():
        torch.testing.assert_close(run[name], tensor)


def test_sources_name_the_entries_and_the_corner_of_the_image_as_it_is_seen(studio: Studio) -> None:
    """What is left over on the left is on the right in the mirror, which differs where it is odd."""
    studio.settings = DataSettings(flip=True, repeats=2, shuffle_tags=True, caption_variants=3)
    (studio.folder / "p0.txt").write_text("a, b, c, d")
    draw(studio.folder / "p1.png", seed=1, size=(41, 20))
    wanted = studio.needs()
    assert len(wanted.sources) == 3 * 2
    odd, keys = 0, set(wanted.keys())
    for source in wanted.sources.values():
        plain, mirrored = source.views
        assert {plain.latents, mirrored.latents} <= keys
        assert len(source.texts) == 4 and set(source.texts) <= keys, "the plain one and three drawn"
        assert wanted.images[mirrored.latents.digest].flip
        placement = wanted.images[plain.latents.digest].placement
        assert source.size_px == (placement.bucket.width_px, placement.bucket.height_px)
        left_px, top_px = placement.left_px, placement.top_px
        over_px = placement.scaled_width_px - placement.bucket.width_px
        odd += over_px % 2
        assert plain.geometry["corner"].tolist() == [[left_px, top_px]]
        assert mirrored.geometry["corner"].tolist() == [[over_px - left_px, top_px]]
    assert odd, "or both corners are the same"


def test_a_long_caption_is_a_note(studio: Studio, caplog: pytest.LogCaptureFixture) -> None:
    (studio.folder / "p1.txt").write_text("(word) " * 200)
    studio.settings = DataSettings(emphasis=True)
    studio.encode()
    (problem,) = studio.problems()
    assert (problem["severity"], problem["code"]) == ("note", "CAP-03")
    assert "has 600 tokens, but only 75 are read: 'word word" in problem["what"]
    assert "longer than the specified maximum" not in caplog.text, "transformers' own words"
    assert studio.work() == (0, [])


def test_pictures_are_decoded_ahead_and_entries_written_behind(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By other threads, each image once, however many latents are made of it."""
    studio.settings, studio.more_px = DataSettings(flip=True), (24,)
    decoded, writers = [], set()
    real_decode, real_write = decode, Cache.write

    def noted(path: Path, **options: Any) -> Any:
        decoded.append((path.name, threading.current_thread() is threading.main_thread()))
        return real_decode(path, **options)

    def write(self: Cache, *what: Any) -> None:
        writers.add(threading.current_thread().name)
        real_write(self, *what)

    monkeypatch.setattr("lora_trainer.cache.encode.decode", noted)
    monkeypatch.setattr(Cache, "write", write)
    assert studio.encode()[0]["latents"] == 3 * 4
    assert sorted(decoded) == [(f"p{index}.png", False) for index in range(3)]
    assert len(writers) == 1 and threading.main_thread().name not in writers


def test_an_encoder_that_is_out_of_memory_is_loaded_anew_on_the_next_device(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, loaded = [torch.device("cpu"), torch.device("cpu", 0)], list[torch.device]()

    def full(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def fill_on_both(*arguments: Any, load_image_encoder: Any, **options: Any) -> Any:
        def load(device: torch.device) -> Any:
            loaded.append(device)
            is_first = len(loaded) == 1
            return SimpleNamespace(encode_images=full) if is_first else load_image_encoder(device)

        return fill(*arguments, load_image_encoder=load, **{**options, "devices": devices})

    monkeypatch.setattr("tests.fakes.studio.fill", fill_on_both)
    assert studio.encode()[0]["latents"] == 3 and loaded == devices
    (problem,) = studio.problems()
    assert problem["what"].startswith("caching continues on cpu:0, slower: CUDA out of memory")


def test_what_is_encoded_when_a_signal_comes_is_written(studio: Studio) -> None:
    asked = iter((None, None, 15))
    wanted = studio.needs()
    keys = wanted.keys()
    with pytest.raises(StoppedBySignal, match=r"2 of 8 done; they stay cached"):
        studio.encode(wanted, stop=lambda: next(asked))
    assert sum(studio.cache.has(key) for key in keys) == 2
    for path in studio.folder.glob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(StoppedBySignal):  # without the pixels of another image
        studio.encode(wanted, stop=lambda: 15)


def test_latents_that_are_not_finite_name_the_picture(studio: Studio, tmp_path: Path) -> None:
    studio.base = copytree(studio.base, tmp_path / "broken base")
    file = studio.base / "vae" / "diffusion_pytorch_model.safetensors"
    weights = {name: torch.full_like(value, torch.nan) for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"p\d.png: .*not finite"):
        studio.encode()


@pytest.mark.parametrize(
    ("part", "name", "said"),
    [
        ("vae", "diffusion_pytorch_model", r"the VAE of the base .* for p\d.png"),
        ("text_encoder", "model", "the text encoder of the base .* for the caption"),
    ],
)
def test_a_part_of_zeros_is_named_before_anything_is_trained(
    part: str, name: str, said: str, studio: Studio, tmp_path: Path
) -> None:
    """Of a file that was allocated whole and never filled."""
    studio.base = copytree(studio.base, tmp_path / "half copied")
    file = studio.base / part / f"{name}.safetensors"
    zeros = {key: torch.zeros_like(value) for key, value in load_file(file).items()}
    save_file(zeros, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=said) as caught:
        studio.encode()
    assert "its weights are damaged" in caught.value.found
