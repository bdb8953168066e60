"""From a request to a run that could start: base, preset and data are chosen as documented, torch-free."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_trainer import families
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.records import as_json
from lora_trainer.config.config import flatten
from lora_trainer.config.layers import read_settings_file
from lora_trainer.hardware.machine import Hardware
from lora_trainer.run import prepare
from lora_trainer.run.plan_text import plan_record
from tests.fakes.family_bases import base_of, facts_of, side_of
from tests.fakes.plans import WITHOUT_CARD, machine
from tests.fakes.runs import Toy, listing, run_cli, toy

PROCESSOR = replace(WITHOUT_CARD, cpu_threads=3, ram_total_bytes=16 << 30, ram_free_bytes=8 << 30)
CARD = replace(PROCESSOR, gpus=machine().gpus)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("prepare"))


def asked(place: Toy, **overrides: Any) -> prepare.Request:
    return prepare.Request(
        dataset=place.dataset,
        overrides={"data.cache_dir": str(place.cache)}
        | {key.replace("__", "."): value for key, value in overrides.items()},
    )


def planned(place: Toy, hardware: Hardware = PROCESSOR, **overrides: Any) -> prepare.Prepared:
    return prepare.prepare(asked(place, **overrides), hardware=hardware)


def with_inputs(prepared: prepare.Prepared, **changes: Any) -> prepare.Prepared:
    return replace(prepared, inputs=replace(prepared.inputs, **changes))


def remarks(prepared: prepare.Prepared) -> list[dict[str, str]]:
    """Return the remarks of a plan: kind, what and advice of each."""
    found: list[dict[str, str]] = as_json(plan_record(prepared).remarks)
    return found


# ---- the base and its preset


DEFAULT = next(iter(families.family(families.DEFAULT_FAMILY).releases))


CHOSEN: list[tuple[str, str, Hardware, float | None, tuple[str, ...]]] = [
    ("auto", "auto", PROCESSOR, None, ("embedded", "cpu", "cpu")),
    ("auto", "auto", CARD, None, (DEFAULT, "10-12", "cuda")),
    ("auto", "auto", PROCESSOR, 24.0, (DEFAULT, "16-24", "cuda")),  # an assumed GPU
    ("auto", "cpu", CARD, None, ("embedded", "cpu", "cpu")),
    ("embedded", "auto", CARD, None, ("embedded", "cpu", "cuda")),
    (DEFAULT, "auto", PROCESSOR, None, (DEFAULT, "6-8", "cpu")),
    ("flux", "auto", PROCESSOR, None, ("flux", "cpu", "cpu")),
]
"""Base, device, hardware and assumed GiB -> base, tier and device."""


@pytest.mark.parametrize("case", range(len(CHOSEN)))
def test_base_preset_and_device_follow_from_the_hardware_and_what_is_typed(
    case: int, place: Toy
) -> None:
    """A real base on a processor takes the recipe of the smallest GPUs, another family its own."""
    base, device, hardware, vram_gib, expected = CHOSEN[case]
    model = str(base_of(base)) if base == "flux" else base
    small = {"data__resolution": 32} if base == "flux" else {}  # no table has the tiny network
    request = asked(place, base__model=model, hardware__device=device, **small)
    prepared = prepare.prepare(replace(request, assumed_vram_gib=vram_gib), hardware=hardware)
    source = "flux" if base == "flux" else prepared.facts.source
    assert (source, prepared.resolved.tier, prepared.config.hardware.device) == expected
    assert prepared.resolved.preset == f"{prepared.family.name}/{prepared.resolved.tier}"
    assert prepared.config.base.model == (model if base == "flux" else source)
    layer = "planner" if base == "auto" else "command line"
    assert prepared.plan.origins["base.model"].layer == layer


def test_the_base_and_its_settings_come_from_the_highest_layer_that_names_them(
    place: Toy, tmp_path: Path
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(
        f'[base]\nmodel = "{base_of("sd15")}"\nprediction = "v_prediction"\n[data]\nresolution = 32\n'
    )
    before = {
        "base.model": str(base_of("sd15")),
        "base.prediction": "v_prediction",
        "data.resolution": 32,
    }
    with_file = replace(asked(place), settings_file=read_settings_file(config))
    resumed = replace(asked(place), run_settings=before)
    for request in (with_file, resumed):
        for zero in ({}, {"objective.zero_terminal_snr": True}):
            overrides = {**request.overrides, **zero}
            planned = prepare.prepare(replace(request, overrides=overrides), hardware=PROCESSOR)
            facts, objective = planned.facts, planned.config.objective
            assert (facts.source, facts.release.prediction) == (
                str(base_of("sd15")),
                "v_prediction",
            )
            assert facts.release.zero_terminal_snr is objective.zero_terminal_snr is bool(zero)
        typed = {"base.model": DEFAULT, "base.prediction": "auto", "data.resolution": "auto"}
        typed |= request.overrides
        prepared = prepare.prepare(replace(request, overrides=typed), hardware=CARD)
        assert prepared.facts.source == DEFAULT


# ---- the format of the files


def test_the_format_is_one_that_can_hold_the_adapter(place: Toy) -> None:
    small_px = side_of(facts_of("zimage"))
    base = {"base__model": str(base_of("zimage")), "data__resolution": small_px}
    prepared = planned(place, adapter__kind="lokr", **base)
    assert prepared.config.output.format == "comfyui"
    origin = prepared.plan.origins["output.format"]
    assert (origin.layer, "zimage" in origin.reason) == ("planner", True)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "LoHa is not written": ("sd15", {"output__format": "diffusers", "adapter__kind": "loha"}),
    "adapter.new_tokens=1 is not possible with the text": (
        "flux", {"adapter__new_tokens": 1, "data__trigger": "toy"},
    ),
    "adapter.refiners=false, but": ("flux", {"adapter__refiners": False}),
    "have no system prompt": ("sd15", {"base__system_prompt": "Be brief."}),
    "data.emphasis=true is not possible": ("sd3", {"data__emphasis": True}),
    "base.prediction=flow, but": ("sd15", {"base__prediction": "flow"}),
    "pure noise says nothing": ("sd15", {"objective__zero_terminal_snr": True}),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused_before_the_dataset_is_read(
    said: str, place: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("lora_trainer.run.prepare.read_dataset")
    base, settings = REFUSED[said]
    request = asked(place, base__model=str(base_of(base)), **settings)
    with pytest.raises(RequestError, match=re.escape(said)):
        prepare.prepare(request, hardware=PROCESSOR)


# ---- what is remarked


def test_what_a_user_will_miss_is_remarked_and_nothing_else(place: Toy, tmp_path: Path) -> None:
    """Of the base, the GPU, the time, the adapter, and programs that read the file."""
    plain = planned(place, base__model="embedded")
    few_steps = replace(plain.facts.release, distilled=True)
    distilled = with_inputs(plain, facts=replace(plain.facts, release=few_steps))
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"its size is enough for a plan")
    assistant = planned(place, base__assistant=str(file))
    flux = asked(place, base__model="black-forest-labs/FLUX.1-dev")
    larger = replace(flux, overrides={**flux.overrides, "data.resolution": 1024})
    roomy = replace(CARD, ram_total_bytes=32 << 30, ram_free_bytes=28 << 30)
    long_run = prepare.prepare(replace(larger, priority="quality"), hardware=roomy)
    runs = {
        "plain": plain,
        "distilled": distilled,
        "helped": with_inputs(assistant, facts=distilled.facts),
        "4 GiB": with_inputs(plain, hardware=machine(4)),
        "8 GiB": with_inputs(plain, hardware=machine(8)),
        "long": with_inputs(long_run, resolved=replace(long_run.resolved, priority="balanced")),
        "as meant": prepare.prepare(flux, hardware=roomy),
        "dora": planned(place, adapter__dora=True),
        "oft": planned(place, adapter__kind="oft"),
        "fewer ranks": planned(place, adapter__noise_rank=8),
        "enough": replace(plain, trained=(plain.trained * 10)[:10]),
    }
    few = f"{len(plain.trained)} images are few"
    beginnings = {
        "plain": [few],
        "distilled": ["embedded is distilled", few],
        "helped": ["embedded is trained together with ", few],
        "4 GiB": [few, "the GPU has 4.0 GiB"],
        "8 GiB": [few],
        "long": ["it takes long on this machine", few],
        "as meant": [few],
        "dora": ["adapter.dora runs in fp32 beside", "output.format=kohya: diffusers drops"],
        "oft": ["output.format=kohya: diffusers, Forge and InvokeAI cannot"],
    }
    for name, run in runs.items():
        for row, start in zip(remarks(run), beginnings.get(name, []), strict=True):
            assert row["what"].startswith(start) and row["advice"], name


@pytest.mark.parametrize(
    "source",
    [
        each.ids[0]
        for name in families.NAMES
        for each in families.family(name).published
        if each.assistant
    ],
)
def test_the_assistant_that_is_published_for_a_base_is_planned_with_it(
    source: str, place: Toy
) -> None:
    """Named with the way without it, and in the memory, also on 8 GiB."""
    hardware = replace(CARD, ram_total_bytes=32 << 30, ram_free_bytes=28 << 30)
    helped = planned(place, hardware, base__model=source)
    assistant = helped.facts.release.assistant
    assert assistant is not None and helped.config.base.assistant == assistant.source
    (said,) = [row for row in remarks(helped) if row["kind"] == "assisted"]
    assert assistant.source in said["what"] and "to download" in said["what"]
    assert "--set base.assistant=none" in said["advice"]
    items = {item.name: item.bytes for item in helped.plan.memory.by_phase["training"]}
    assert items["assistant weights"] == assistant.download_bytes
    assert helped.plan.memory.fits
    alone = planned(place, hardware, base__model=source, base__assistant="none")
    kinds = [row["kind"] for row in remarks(alone)]
    assert "assisted" not in kinds and ("distilled" in kinds) == alone.facts.release.distilled
    if alone.facts.release.distilled:
        undone = planned(place, hardware, base__model=source, base__distilled=False)
        assert (undone.config.base.assistant == "none") != undone.facts.release.distilled


# ---- the data


def test_the_plan_counts_what_is_trained(place: Toy) -> None:
    short = {"train__steps": 12, "train__batch_size": 1}
    prepared = planned(place, data__validation_fraction=0.5, data__repeats=2, **short)
    assert prepared.plan.epochs == pytest.approx(12 / (3 * 2))
    trained, held_out = (
        {record.name for record in records} for records in (prepared.trained, prepared.held_out)
    )
    assert trained | held_out == {f"p{index}.png" for index in range(6)} and not trained & held_out


def test_a_preset_s_resolution_is_not_above_what_the_base_was_trained_on(place: Toy) -> None:
    """Whoever types a larger one gets it."""
    base = str(base_of("flux"))
    prepared = planned(place, CARD, base__model=base)
    assert prepared.config.data.resolution == prepared.facts.resolution_px < 512
    assert "was trained on" in prepared.plan.origins["data.resolution"].reason
    assert max(max(size) for size in prepared.plan.images_at_once) < 512
    typed = planned(place, CARD, base__model=base, data__resolution=512)
    assert typed.config.data.resolution == 512


def test_more_resolutions_are_planned_for(place: Toy) -> None:
    small = {"data__resolution": 32, "data__validation_fraction": 0.2}
    one, both = (planned(place, **small, data__more_resolutions=more) for more in ((), (64,)))
    assert set(one.plan.images_at_once) < set(both.plan.images_at_once)
    assert max(w * h for w, h in both.plan.images_at_once) > 32**2
    assert both.plan.memory.phases["training"] > one.plan.memory.phases["training"]
    assert both.plan.disk_bytes["cache"] > one.plan.disk_bytes["cache"]
    assert {len(record.placements) for record in both.trained} == {2}
    assert {len(record.placements) for record in both.held_out} == {1}
    (enlarged,) = (row["what"] for row in remarks(both) if row["kind"] == "enlarged")
    assert f"{len(both.trained)} of {len(both.trained)} images" in enlarged


def test_prompts_are_read_with_their_options_before_anything_is_encoded(place: Toy) -> None:
    lines = ["a cat --n mud --d 3", "a dog --n mud"]
    prepared = planned(place, **{"sampling.prompts": lines})
    assert prepared.sample_texts == ("a cat", "a dog", "mud")
    assert [prompt.seed for prompt in prepared.drawn_prompts] == [3, None]
    for line, said in (
        ("a cat --ar 16:9", "--ar, which is not read here"),
        ("a cat --w 15", "multiples of"),
        ("a cat --w 4096 --h 4096", "memory is planned for"),
    ):
        with pytest.raises(RequestError, match=said):
            planned(place, **{"sampling.prompts": [line]})


def test_resolutions_that_make_no_sense_are_refused(place: Toy) -> None:
    for more, said in ((41, "more_resolutions=41 is not a multiple"), (64, "name a size twice")):
        with pytest.raises(RequestError, match=said):
            planned(place, data__more_resolutions=(more,))


def test_a_mask_that_cannot_be_used_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    place = toy(tmp_path)
    Image.new("L", (40, 40), 0).save(place.dataset / "p3-masklabel.png")
    request = asked(place, data__masks="files", data__max_bad_fraction=1.0)
    said = re.escape("masks cannot be used: p3-masklabel.png is black everywhere")
    with pytest.raises(InputError, match=said):
        prepare.prepare(request, hardware=PROCESSOR)
    report, _ = prepare.examine(request, hardware=PROCESSOR)
    assert [one.file for one in report.findings if one.kind == "bad-mask"] == ["p3-masklabel.png"]


def test_check_says_what_plan_says_and_neither_writes_more_than_the_memo_in_the_cache(
    tmp_path: Path,
) -> None:
    place = toy(tmp_path)
    before = listing(place.dataset)
    report = planned(place).report
    examined = prepare.examine(asked(place), hardware=PROCESSOR)[0]
    assert report == replace(examined, pictures=()), "a training does not keep each image"
    assert len(examined.pictures) == examined.images
    assert listing(place.dataset) == before
    assert {path.name for path in place.folder.iterdir()} == {"toy", "cache"}
    assert [path.name for path in place.cache.iterdir()] == [".memo.sqlite"]


def test_the_cache_folder_is_the_setting_or_the_user_s(
    place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for settings, folder in (({}, "xdg/lora-train"), ({"data.cache_dir": "~/mine"}, "mine")):
        request = prepare.Request(dataset=place.dataset, overrides=settings)
        assert prepare.prepare(request, hardware=PROCESSOR).cache_root == tmp_path / folder


# ---- going on, and several processes


def of_a_card(free_gib: float) -> Hardware:
    card = replace(CARD.gpus[0], free_bytes=int(free_gib * (1 << 30)))
    return replace(CARD, gpus=(card,), ram_free_bytes=32 << 30)


def test_a_run_goes_on_as_it_was_planned_whatever_is_free_today(place: Toy) -> None:
    wanted = asked(
        place,
        base__model="stabilityai/stable-diffusion-xl-base-1.0",
        train__batch_size=8,
        memory__gradient_checkpointing="full",
        sampling__every_steps=0,
    )
    first = prepare.prepare(wanted, hardware=of_a_card(9.0))
    before = {
        "run_settings": flatten(first.config),
        "run_at_once": {f"{w}x{h}": count for (w, h), count in first.plan.images_at_once.items()},
    }
    today = of_a_card(8.0)
    fresh = prepare.prepare(wanted, hardware=today)
    assert fresh.plan.images_at_once != first.plan.images_at_once
    resumed = prepare.prepare(replace(wanted, overrides={}, **before), hardware=today)
    assert resumed.plan.images_at_once == first.plan.images_at_once
    assert resumed.config == first.config
    typed = {"memory.streamed_blocks": 4}
    again = prepare.prepare(replace(wanted, overrides=typed, **before), hardware=today)
    assert again.plan.images_at_once != first.plan.images_at_once
    more_steps = prepare.prepare(
        replace(wanted, overrides={"train.steps": 9000}, **before), hardware=today
    )
    assert more_steps.plan.images_at_once == first.plan.images_at_once


def test_a_step_is_shared_by_processes_and_each_is_planned_for_its_share(place: Toy) -> None:
    alone = planned(place, CARD, train__batch_size=4)
    for batch, images, said in (
        (4, [2, 2], ""),
        (4, [1, 1, 2], "some wait"),
        (1, [0, 1], "only 1 have work"),
    ):
        request = replace(asked(place, train__batch_size=batch), processes=len(images))
        shared = prepare.prepare(request, hardware=CARD)
        assert shared.config.train.batch_size == batch
        assert plan_record(shared).processes.images == images
        assert max(shared.plan.images_at_once.values()) <= max(images)
        warnings = [row["what"] for row in remarks(shared) if row["kind"] == "processes"]
        assert (said in warnings[0]) if said else not warnings
        if batch > 1:
            assert shared.plan.seconds_per_step < alone.plan.seconds_per_step


def test_processes_of_one_machine_share_its_threads(place: Toy) -> None:
    request = replace(asked(place, base__model="embedded"), processes=4)
    for sharing, threads in ((1, 3), (2, 1), (4, 1)):
        planned = prepare.prepare(replace(request, sharing=sharing), hardware=PROCESSOR)
        assert planned.config.hardware.threads == threads
        reason = planned.plan.origins["hardware.threads"].reason
        assert sharing == 1 or f"3 for {sharing} processes" in reason


def test_the_path_of_one_setting(
    place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in a file, read once, validated after layering and after planning, then a typed attribute."""
    calls: dict[str, list[Any]] = {}

    def follow(path: str) -> None:
        module, _, name = path.rpartition(".")
        function = getattr(import_module(module), name)

        def followed(first: Any, *more: Any, **options: Any) -> Any:
            calls.setdefault(name, []).append(first)
            return function(first, *more, **options)

        monkeypatch.setattr(path, followed)

    follow("lora_trainer.config.layers.read_settings_text")
    follow("lora_trainer.config.config.contradictions")
    follow("lora_trainer.run.plan_text.plan_text")
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nbatch_size = 3\n")
    line = [str(place.dataset), "--base", "embedded", "--config", str(file)]
    assert run_cli(["plan", *line, "--set", f"data.cache_dir={place.cache}"]) == 0
    assert len(calls["read_settings_text"]) == 1
    checked = [config for config in calls["contradictions"] if config.train.batch_size == 3]
    assert [type(config).__name__ for config in checked][:2] == ["Config", "RunConfig"]
    (prepared,) = calls["plan_text"]
    assert prepared.config is checked[-1]
    assert prepared.config.memory.micro_batch <= 3, "no auto is left beside it"
    assert prepared.plan.origins["train.batch_size"].layer == f"config {file}"
