"""Files that are none, of nobody, or damaged; the tables of keys; the command.

A reason in one line, or a reading that loads; never a traceback.
"""

from __future__ import annotations

import copy
import json
import random
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config import layers
from lora_trainer.config.config import build_config, setting_keys
from lora_trainer.importing import reading
from tests.fakes.runs import run_cli
from tests.importing.corpus import ALL, CASES, Case

ROOT = Path(__file__).resolve().parents[2]
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 10**30, 1.5, -0.5, 1e308, float("nan"), float("inf"), "", "x", "1e-4", "nan",
    "1e400", "0", "a\x00b", "\u2603" * 300, "C:\\x", "..", [], [1], [[1, 2], [3]], ["x", None], {}, {"a": {"b": 1}},
    [{"a": 1}], [[]], ["=", "a=", "=b"],
)  # fmt: skip
MUTATIONS = 400


def test_what_is_nobodys_is_refused(tmp_path: Path) -> None:
    for name, text, message in (
        ("a.toml", b"a = = 1", "is not TOML"),
        ("deep.json", b"[" * 100_000 + b"]" * 100_000, "is not JSON"),
        ("large.json", json.dumps({"a": "x" * (5 << 20)}).encode(), "is larger than"),
        ("b.toml", b"a = '\xff'", "cannot read"),
        ("deep.yaml", b"[" * 3000 + b"]" * 3000, "is not YAML"),
        ("a.yaml", b"a: &x [1]\nb: *x\n", "aliases"),
        ("a.json", b"[1, 2]", "is of no trainer"),
        ("b.json", b"3", "holds no table"),
        ("ours.toml", b"[adapter]\nrank = 4\n", "of this program already"),
        ("run.json", b'{"settings": {"adapter.rank": 4}}', "of this program already"),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(InputError) as caught:
            reading.import_file(tmp_path / name)
        assert message in caught.value.found and "\n" not in caught.value.found, name
        assert caught.value.fix


@pytest.mark.parametrize(
    ("said", "least", "power"),
    [
        ({}, 1, 1.0),
        ({"tlora_min_rank": 4, "tlora_alpha": 2.0}, 4, 2.0),
        ({"tlora_min_rank": 99}, 8, 1.0),
    ],
    ids=str,
)
def test_ranks_by_noise_are_read(
    said: dict[str, Any], least: int, power: float, tmp_path: Path
) -> None:
    case = next(case for case in ALL if case.trainer == "SimpleTuner" and case.name == "lycoris")
    file = case.write(tmp_path)
    lycoris = {"algo": "tlora", "linear_dim": 8, "linear_alpha": 8, **said}
    (tmp_path / "lycoris_config.json").write_text(json.dumps(lycoris))
    imported = reading.import_file(file)
    adapter = build_config(imported.settings).adapter
    assert (adapter.kind, adapter.rank) == ("lora", 8)
    assert (adapter.noise_rank, adapter.noise_rank_power) == (least, power)
    assert not [line for line in imported.without_equivalent if "tlora" in line]


@pytest.mark.parametrize(
    ("said", "scale", "schedule", "nearest", "lacking"),
    [
        ({}, 1.0, "constant", (), ()),
        ({"guidance_loss_target": 4.0}, 1.0, "constant", (), ()),
        ({"do_guidance_loss": True}, 3.0, "constant", (), ()),
        ({"do_guidance_loss": True, "guidance_loss_schedule": "sigma"}, 3.0, "sigma", (), ()),
        (
            {"do_guidance_loss": True, "guidance_loss_target": [3.0, 4.0]},
            3.5,
            "constant",
            ("guidance_loss_target",),
            (),
        ),
        (
            {"do_guidance_loss": True, "guidance_loss_target": "much"},
            1.0,
            "constant",
            (),
            ("guidance_loss_target",),
        ),
        (
            {"do_guidance_loss": True, "unconditional_prompt": "bad"},
            3.0,
            "constant",
            (),
            ("unconditional_prompt",),
        ),
    ],
    ids=str,
)
def test_a_contrastive_target_is_read(
    said: dict[str, Any],
    scale: float,
    schedule: str,
    nearest: tuple[str, ...],
    lacking: tuple[str, ...],
    tmp_path: Path,
) -> None:
    network = {"type": "lora", "linear": 8, "linear_alpha": 8}
    process = {
        "type": "sd_trainer",
        "network": network,
        "model": {"name_or_path": "black-forest-labs/FLUX.1-dev", "arch": "flux"},
        "train": {"steps": 100, **said},
    }
    job = {"job": "extension", "config": {"name": "a", "process": [process]}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    imported = reading.import_file(tmp_path / "job.json")
    objective = build_config(imported.settings).objective
    assert (objective.contrast_scale, objective.contrast_schedule) == (scale, schedule)
    assert objective.guidance_scale == scale, "FLUX is told the same number"
    for lines, keys in ((imported.nearest, nearest), (imported.without_equivalent, lacking)):
        assert {key.split(".")[-1] for key in lines if "guid" in key or "uncond" in key} == {*keys}


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value, tables and lists included."""
    pairs = enumerate(data) if isinstance(data, list) else getattr(data, "items", tuple)()
    for key, value in pairs:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def mutated(data: Any, draw: random.Random, keys: list[str]) -> Any:
    """Return a copy in which one to three values are odd or gone, and one of the trainer's keys is added."""
    result = json.loads(json.dumps(data))
    if isinstance(result, dict):
        result[draw.choice(keys)] = draw.choice(ODD)
    for _ in range(draw.randint(1, 3)):
        paths = list(leaves(result))
        if not paths:
            return result
        *parents, last = draw.choice(paths)
        place = result
        for part in parents:
            place = place[part]
        if draw.random() < 0.1:
            del place[last]
        else:
            place[last] = copy.deepcopy(draw.choice(ODD))
    return result


INNER: Mapping[str, tuple[Any, ...]] = {
    "ai-toolkit": ("config", "process", 0),
    "LoRA_Easy_Training_Scripts": ("general_args", "args"),
}
"""Trainers whose keys are in a table further in."""


def test_damaged_values_give_a_reading_with_each_unknown_key_or_a_reason(tmp_path: Path) -> None:
    draw = random.Random(18)
    keys = [key for trainer in reading.TRAINERS for key in trainer.keys if "." not in key]
    count = 0
    for number in range(MUTATIONS):
        case = CASES[number % len(CASES)]
        suffix = ".json" if case.suffix == ".toml" else case.suffix  # TOML holds no null
        beside = {
            name: mutated(one, draw, keys)
            for name, one in case.beside.items()
            if name.endswith(".json")
        }
        data = mutated(case.data, draw, keys)
        table = data
        try:
            for part in INNER.get(case.trainer, ()):
                table = table[part]
        except (KeyError, IndexError, TypeError):  # damaged on the way
            table = None
        unknown = {"of_tomorrow"} if isinstance(table, dict) else set()
        if unknown:
            table["of_tomorrow"] = 3
        damaged = Case(**{**vars(case), "data": data, "beside": beside, "suffix": suffix})
        try:
            imported = reading.import_file(damaged.write(tmp_path))
        except (RequestError, InputError) as error:
            assert error.found and error.fix, damaged.data
            continue
        count += 1
        json.dumps(imported.to_json())
        assert unknown <= set(imported.unknown), "it is named"
        written = layers.read_settings_text(
            reading.settings_toml(imported), name="ours.toml", toml=True
        )
        build_config(written.values)
    assert count > MUTATIONS / 2


# ---- the tables


def test_the_tables_name_settings_and_say_why_and_the_docs_count_their_keys() -> None:
    """Of two rules of one key in a table the later would win unseen."""
    rows: dict[str, dict[str, Any]] = {}
    for trainer in reading.TRAINERS:
        rows.setdefault(trainer.name.partition(" (")[0], {}).update(trainer.keys)
        for name, rule in trainer.keys.items():
            if rule.kind == "carried":
                assert rule.setting in setting_keys(), name
            elif rule.kind != "read":
                assert len(rule.why) > 8 and "\n" not in rule.why, name
    text = (ROOT / "docs" / "importing.md").read_text(encoding="utf-8")
    table = text.partition("| trainer | commit |")[0]
    lines = re.findall(r"^\| (\S+) \| [^|]+ \| (.+) \|$", table, re.MULTILINE)
    told = {name: list(map(int, numbers.split("|"))) for name, numbers in lines if name in rows}
    for name, keys in rows.items():
        kinds = Counter(rule.kind for rule in keys.values())
        other = [kinds[kind] for kind in ("nothing_to_set", "no_equivalent", "refused")]
        assert told[name] == [len(keys), len(keys) - sum(other), *other], name
    for file in (ROOT / "lora_trainer" / "importing" / "trainers").glob("*.toml"):
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        kinds_of_keys = ("read", "nothing_to_set", "no_equivalent", "refused")
        entries = [entry for kind in kinds_of_keys for entry in data.get(kind, ())]
        every = Counter([*data.get("carried", ()), *data.get("absent", "").split()])
        for entry in entries:
            for prefix in entry.get("under", [""]):
                every.update(f"{prefix}{key}" for key in entry["keys"].split())
        assert [key for key, times in every.items() if times > 1] == [], file


SUBSET = "datasets[].subsets[]."
KEYS = next(trainer.keys for trainer in reading.TRAINERS if trainer.name == "sd-scripts")
VALUES: tuple[Any, ...] = ("x", 0.5, True, ["a=b"], "", "odd_shift", "sigma_sqrt")
ELSEWHERE = """image_dir class_tokens batch_size general datasets is_reg dataset_class metadata_file
    token_warmup_min in_json min_bucket_reso max_bucket_reso model_type train_data_dir dataset_repeats
    huber_c huber_schedule huber_scale sigmoid_scale mode_scale system_prompt"""
"""Options that say something in a dataset only, or beside others."""


def test_no_option_is_lost_and_each_that_is_read_says_something(tmp_path: Path) -> None:
    """Each option of sd-scripts alone in a file, and each of a subset in the tables where it may stand."""
    lost: list[Any] = []
    idle: set[str] = set()

    def read(name: str, data: dict[str, Any]) -> Any:
        """Read a file; None: it is refused, which says something too."""
        file = tmp_path / "theirs.json"
        file.write_text(json.dumps(data), encoding="utf-8")
        try:
            imported = reading.import_file(file)
        except RequestError:
            return None
        rows = [*imported.sources.values(), *imported.nearest, *imported.nothing_to_set]
        words = " ".join([*rows, *imported.without_equivalent, *imported.unknown]).split()
        said = [re.sub(r"^.*\]\.|^general\.", "", word) for word in words]
        if name in imported.unknown or not any(f"{w}.".startswith(f"{name}.") for w in said):
            lost.append((name, data))
        return imported

    for name, rule in ((name, rule) for name, rule in KEYS.items() if "." not in name):
        is_read = rule.kind == "read"
        idle |= {name} if is_read and name not in ELSEWHERE.split() else set()
        besides = [({}, VALUES), ({"ae": "x"}, VALUES[:3]), ({"min_snr_gamma": 5}, VALUES[:1])]
        for beside, values in besides if is_read else [({}, ("x", False))]:
            for value in values:
                imported = read(name, {"seed": 1, **beside, name: value})
                if imported is not None and name not in imported.nothing_to_set:
                    why = imported.without_equivalent.get(name, "")
                    idle -= set() if "means nothing beside" in why else {name}
    for name in (key.removeprefix(SUBSET) for key in KEYS if key.startswith(SUBSET)):
        for value in ("x", True, 0.2):
            row, subset = {name: value}, {"image_dir": "a"}
            read(name, {"general": row, "datasets": [{"subsets": [subset]}]})
            read(name, {"datasets": [{**row, "subsets": [subset]}]})
            read(name, {"datasets": [{"subsets": [row | subset]}]})
    assert not lost and not idle


# ---- the command


def test_the_command_prints_and_writes_settings_with_all_that_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = next(case for case in ALL if case.id == "sd-scripts-tables-a_folder_of_any_name")
    file = theirs.write(tmp_path)
    assert run_cli(["import", str(file)]) == 0
    text = capsys.readouterr().out
    assert "# general.shuffle_caption" in text and "class_tokens" in text
    assert tomllib.loads(text)["data"]["folders"]["10_my.zibbo \u732b"]["repeats"] == 3
    assert run_cli(["import", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == reading.import_file(file).to_json()
    for ours in (tmp_path / "ours.toml", tmp_path / "ours.json"):
        assert run_cli(["import", str(file), "--output", str(ours)]) == 0
        said = capsys.readouterr().out
        assert "Train on: " in said and "class_tokens" in said and "Not known: " in said
        assert layers.read_settings_file(ours).values == reading.import_file(file).settings
    assert run_cli(["import", str(file), "--output", str(ours)]) == 2, "it exists"
    assert run_cli(["import", str(file), "--output", str(ours), "--force"]) == 0
    assert run_cli(["import", str(file), "--output", str(tmp_path / "a.txt")]) == 2


@pytest.mark.parametrize("name", ["usual.toml", r"C:\fakepath\usual.toml"])
def test_the_bytes_of_a_file_are_read_without_opening_any(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = tmp_path / "dataset.toml"
    dataset.write_text(
        '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "images"\nnum_repeats = 7\n'
    )
    values = {"pretrained_model_name_or_path": "a.safetensors", "network_module": "networks.lora"}
    values |= {"network_dim": 12, "max_train_epochs": 3, "dataset_config": str(dataset)}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    (tmp_path / "usual.toml").write_text(text)
    assert reading.import_file(tmp_path / "usual.toml").dataset == "images"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "open", None)
    imported = reading.import_bytes(text.encode(), name)
    assert imported.settings["adapter.rank"] == 12 and imported.dataset is None
    assert "import it by itself" in imported.without_equivalent["dataset_config"]
    assert "max_train_epochs" in imported.without_equivalent
    assert any("adapter.rank" in line for line in reading.report(imported).splitlines())


def test_a_lora_tells_the_settings_of_its_training_as_the_file_it_was_made_with(
    tmp_path: Path,
) -> None:
    entries = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": "32",
        "ss_network_alpha": "16.0",
        "ss_network_args": '{"conv_dim": "8", "conv_alpha": "4"}',
        "ss_unet_lr": "0.0001",
        "ss_text_encoder_lr": "5e-05",
        "ss_max_train_steps": "1800",
        "ss_lr_warmup_steps": "100",
        "ss_lr_scheduler": "cosine",
        "ss_optimizer": "bitsandbytes.optim.adamw.AdamW8bit(weight_decay=0.1,betas=(0.9, 0.99))",
        "ss_mixed_precision": "bf16",
        "ss_seed": "42",
        "ss_min_snr_gamma": "None",
        "ss_debiased_estimation": "True",
        "ss_sd_model_name": "sd_xl_base_1.0.safetensors",
        "ss_session_id": "7",
        "ss_tag_frequency": '{"10_toy": {"a toy": 3}}',
        "ss_datasets": json.dumps(
            [
                {
                    "batch_size_per_device": 4,
                    "resolution": [1024, 768],
                    "enable_bucket": True,
                    "subsets": [{"num_repeats": 5, "shuffle_caption": True, "keep_tokens": 1}],
                }
            ]
        ),
    }
    header = json.dumps({"__metadata__": entries, "x": {"dtype": "F32"}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0" * 9)
    (tmp_path / "a.toml").write_text(
        """
        network_module = "networks.lora"
        network_dim = 32
        network_alpha = 16
        network_args = ["conv_dim=8", "conv_alpha=4"]
        unet_lr = 1e-4
        text_encoder_lr = 5e-5
        max_train_steps = 1800
        lr_warmup_steps = 100
        lr_scheduler = "cosine"
        optimizer_type = "AdamW8bit"
        optimizer_args = ["weight_decay=0.1", "betas=(0.9, 0.99)"]
        mixed_precision = "bf16"
        seed = 42
        debiased_estimation_loss = true
        train_batch_size = 4
        resolution = "1024,768"
        enable_bucket = true
        num_repeats = 5
        shuffle_caption = true
        keep_tokens = 1
        """
    )
    read, as_file = (reading.import_file(tmp_path / name) for name in ("a.safetensors", "a.toml"))
    assert read.settings == as_file.settings and read.settings["adapter.conv_rank"] == 8
    assert read.unknown == []
    assert "sd_xl_base_1.0" in read.without_equivalent["pretrained_model_name_or_path"]
    for raw in (b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]"):
        (tmp_path / "b.safetensors").write_bytes(raw)
        with pytest.raises(InputError, match="not a whole"):
            reading.import_file(tmp_path / "b.safetensors")
