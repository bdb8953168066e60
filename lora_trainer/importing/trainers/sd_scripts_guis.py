"""The files of two interfaces of sd-scripts, put back into its arguments and read as those.

kohya_ss (bmaltais): JSON files that its LoRA tab saves, at 45088f0 and older, zeros and empty texts that
mean "not given" included. LoRA_Easy_Training_Scripts (derrian-distro): TOML files by page, at ae5ce07; each page
has `args` and `dataset`, which become one training and one dataset file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import shared
from lora_trainer.importing.foreign import Foreign
from lora_trainer.importing.rules import Trainer, flattened, rules_of, table_of
from lora_trainer.importing.trainers import sd_scripts, sd_scripts_dataset

_SIGNS = {
    "num_cpu_threads_per_process", "LoRA_type", "additional_parameters", "max_data_loader_n_workers",
    "create_caption", "create_buckets", "full_path", "lr_warmup",
}  # fmt: skip
"""Keys of which sd-scripts' own files have one at most."""
_OTHER_MODELS = ("hunyuan_", "anima_", "lumina_")


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of the file, which is flat."""
    if {"folders", "accelerate_launch"} <= set(data):  # the defaults of the whole interface
        return flattened(data)
    is_one = len(_SIGNS & set(data)) >= 2
    return dict(data) if is_one or {"LoRA_type", "network_dim"} <= set(data) else None


def read(foreign: Foreign) -> None:
    """Put the file into sd-scripts' arguments and read those."""
    if foreign.values.get("LoRA_type") is None:
        raise RequestError(
            "there is no LoRA_type: it is of the dreambooth, finetune or textual inversion tab",
            fix="give a file that the LoRA tab has saved",
        )
    for key in foreign.values:
        if key.startswith(_OTHER_MODELS) and not key.endswith("_checkbox"):
            foreign.stays(key, "is of a model that is not chosen")
    arguments = _Arguments(foreign, table_of("kohya_gui"))
    _model(arguments)
    _network(arguments)
    _rates_and_length(arguments)
    _noise_and_samples(arguments)
    sd_scripts_rules = rules_of("sd_scripts")
    renamed = arguments.table["renamed"]
    for key in foreign.values:
        argument = renamed.get(key, key)
        if (
            argument in sd_scripts_rules
            and key not in arguments.taken
            and argument not in arguments
        ):
            arguments.take(key, argument)
    _add_typed(arguments, foreign.word("additional_parameters", ""))
    rest = {key: value for key, value in foreign.values.items() if key not in arguments.taken}
    foreign.values = {**rest, **arguments}
    sd_scripts.read_training(foreign)


class _Arguments(dict[str, Any]):
    """sd-scripts' arguments of a file; `taken` holds the keys of which all is said or an argument made."""

    def __init__(self, foreign: Foreign, table: Mapping[str, Any]) -> None:
        self.foreign, self.table = foreign, table
        self.zero_is_none = set(table["zero_is_none"]["keys"].split())
        self.taken = set(foreign.named)

    def add(self, argument: str, value: Any, key: str) -> None:
        """Add an argument, and the key it is from."""
        self[argument] = value
        self.taken.add(key)
        if argument != key:
            self.foreign.called[argument] = key

    def drop(self, key: str, why: str) -> None:
        """Leave a key out that the file has, and say why."""
        if key in self.foreign.values:
            self.foreign.stays(key, why)
            self.taken.add(key)

    def take(self, key: str, argument: str) -> None:
        """Add a key as an argument, unless its value means that it is not given."""
        value = self.foreign.values[key]
        is_none = argument in self.zero_is_none and value in (0, "0", False)
        if value in ("", None) or is_none:
            self.drop(key, "is not given")
        else:
            self.add(argument, value, key)


def _model(arguments: _Arguments) -> None:
    """Take the settings that count only while a model's box is ticked."""
    for box, table in arguments.table["of_model"].items():
        for key, argument in table.items():
            if not arguments.foreign.values.get(box):
                arguments.drop(key, f"is of {box}, which is not ticked")
            elif key in arguments.foreign.values:
                arguments.take(key, argument)
        arguments.drop(box, "the base's files say what it is")


def _network(arguments: _Arguments) -> None:
    foreign, table = arguments.foreign, arguments.table
    kind = str(foreign.values["LoRA_type"])
    module, algorithm = table["kinds"].get(kind, ("networks.lora", ""))
    if kind not in table["kinds"]:
        foreign.is_nearest("LoRA_type", f"{kind}: adapter.kind=lora")
    arguments.add("network_module", module, "LoRA_type")
    options: dict[str, Any] = {"algo": algorithm} if algorithm else {}
    has_conv = algorithm or kind in ("Kohya DyLoRA", "Kohya LoCon")
    of_lycoris = table["network"]["of_lycoris"].split()
    for key in (*table["network"]["of_all"].split(), *of_lycoris):
        if key not in foreign.values:
            continue
        value = foreign.values[key]
        if key == "train_on_input" and algorithm != "ia3":
            value = False
        used = has_conv if key.startswith("conv_") else algorithm or key not in of_lycoris
        is_off = value in ("", 0, False, None, "all") and not (key == "conv_dim" and algorithm)
        if not used or is_off:
            arguments.drop(key, "is off there, or of another kind of LoRA")
        else:
            options[key] = value
            arguments.taken.add(key)
            foreign.called[f"network_args.{key}"] = key
    if algorithm and "LyCORIS_preset" in foreign.values:
        options["preset"] = foreign.values["LyCORIS_preset"]
        arguments.taken.add("LyCORIS_preset")
        foreign.called["network_args.preset"] = "LyCORIS_preset"
    if options:
        arguments["network_args"] = options


def _rates_and_length(arguments: _Arguments) -> None:
    """The warm-up is in percent; 0 as rate of the text encoder means that only the U-Net is trained."""
    foreign = arguments.foreign
    rate, unet = foreign.nonzero("text_encoder_lr", 0), foreign.nonzero("unet_lr", 0)
    if rate:
        arguments.add("text_encoder_lr", rate, "text_encoder_lr")
    elif unet and "text_encoder_lr" in foreign.values:
        arguments.add("network_train_unet_only", True, "text_encoder_lr")
    if not rate and not unet:
        arguments.drop("text_encoder_lr", "learning_rate is for it too")
    percent, steps = foreign.nonzero("lr_warmup", 0), foreign.nonzero("lr_warmup_steps", 0)
    if percent and not steps:
        arguments.add("lr_warmup_steps", percent / 100, "lr_warmup")
        arguments.drop("lr_warmup_steps", "lr_warmup says more")
    epoch = foreign.nonzero("epoch", 0)
    if epoch and not (foreign.number("max_train_epochs") or foreign.number("max_train_steps")):
        arguments.add("max_train_epochs", epoch, "epoch")


def _noise_and_samples(arguments: _Arguments) -> None:
    foreign = arguments.foreign
    kind = foreign.word("noise_offset_type", "Original")
    unused = ("noise_offset", "adaptive_noise_scale") if kind == "Multires" else (
        "multires_noise_iterations", "multires_noise_discount")  # fmt: skip
    for key in unused if "noise_offset_type" in foreign.values else ():
        arguments.drop(key, f"noise_offset_type is {kind}")
    if foreign.values.get("xformers") is not None:
        arguments.add("xformers", foreign.values["xformers"] in (True, "xformers"), "xformers")
    lines = foreign.word("sample_prompts", "").splitlines()
    texts = [line.partition(" --")[0].strip() for line in lines]
    texts = [text for text in texts if text and not text.startswith("#")]
    if texts:
        foreign.set("sampling.prompts", texts, "sample_prompts")
        arguments.taken.add("sample_prompts")
    else:
        arguments.drop("sample_prompts", "is not given")


def _add_typed(arguments: _Arguments, text: str) -> None:
    """Add the arguments typed as text, which win."""
    name = ""
    for part in shared.split_words(text):
        if part.startswith("--"):
            name, equals, value = part[2:].partition("=")
            arguments[name] = value if equals else True
        elif name:
            before = arguments[name]
            arguments[name] = part if before is True else f"{before} {part}"


# ---- LoRA_Easy_Training_Scripts


def flat_pages(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of all pages; the dataset's stand under the names of a dataset file."""
    if not any({"args", "dataset"} & set(page) for page in _pages(data)):
        return None
    mode = data.get("train_mode")
    if isinstance(mode, Mapping):
        mode = mode.get("train_mode")
    return {**_together(data, "args"), "train_mode": mode}


def _pages(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name, page in data.items():
        if name.endswith("_args") and isinstance(page, Mapping):
            yield page


def _together(data: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return one part of all pages as one table."""
    values: dict[str, Any] = {}
    for page in _pages(data):
        table = page.get(part)
        values |= table if isinstance(table, Mapping) else {}
    return values


def read_pages(foreign: Foreign) -> None:
    """Read the subsets as a dataset file, then the arguments as those of a training."""
    mode = foreign.values.pop("train_mode") or "lora"
    if mode != "lora":
        raise RequestError(
            f"train_mode={mode}: only LoRAs are trained here", fix="give a file of its LoRA mode"
        )
    foreign.stays("train_mode", "is what is trained here")
    values = foreign.values
    share = values.pop("warmup_ratio", None)
    if share is not None and "lr_warmup_steps" not in values:
        values["lr_warmup_steps"] = share
        foreign.called["lr_warmup_steps"] = "warmup_ratio"
    if isinstance(values.get("max_train_epochs"), int) and values["max_train_epochs"] > 0:
        values.pop("max_train_steps", None)
    foreign.is_flow = any(name in values for name in ("ae", "t5xxl", "clip_l"))
    subsets = [
        {key: value for key, value in one.items() if key != "name"}
        for one in shared.tables_of(foreign.data.get("subsets"))
    ]
    if subsets:
        options = _together(foreign.data, "dataset")
        tables = {"": options, **{f"subsets[{n}].": one for n, one in enumerate(subsets)}}
        for prefix, table in tables.items():
            for key, value in table.items():
                values[f"datasets[0].{prefix}{key}"] = value
                foreign.called[f"datasets[0].{prefix}{key}"] = f"{prefix}{key}"
        dataset = {"datasets": [{**options, "subsets": subsets}]}
        sd_scripts_dataset.read_dataset(foreign, dataset)
    sd_scripts.read_training(foreign)


KOHYA_GUI = Trainer("kohya_ss", ("kohya_gui", "sd_scripts"), flat, read)
LORA_EASY = Trainer(
    "LoRA_Easy_Training_Scripts",
    ("sd_scripts_dataset", "sd_scripts", "lora_easy"),
    flat_pages,
    read_pages,
)
