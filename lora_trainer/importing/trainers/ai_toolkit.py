"""ai-toolkit (ostris): YAML jobs and those its interface writes: `sd_trainer`, `diffusion_trainer`, and sliders.

The words of a slider are read from the job itself, which is what a slider is trained on here. The keys are those of
the one process of a job, at 27a03a9. Its defaults are set where the job leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import folder_tables as folders
from lora_trainer.importing import training_options as training
from lora_trainer.importing.foreign import (
    THERE,
    YES,
    Foreign,
    Sourced,
    Trainer,
    as_number,
    flattened,
    shown,
)
from lora_trainer.importing.prompt_options import set_prompts

_SLIDERS = ("slider", "concept_slider")
_TYPES = ("sd_trainer", "diffusion_trainer", "ui_trainer", *_SLIDERS)
# The default of a job of type `concept_slider`; one of type `slider` has no such key, and trains with 1.
_SLIDER_STRENGTH, _WORDS_STRENGTH = 3.0, 1.0
_SLIDER_WORDS = "slider."
_WORDS = (
    *("target_class", "positive", "negative", "positive_prompt", "negative_prompt", "anchor_class"),
    *("].prompt", "].weight"),
)
# The ways to draw timesteps that are the same here.
_OWN_TIMESTEPS = ("sigmoid", "linear", "shift", "flux_shift", "lumina2_shift")


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a job's one process, and `config.` and `meta.` ones of the rest."""
    config = data.get("config")
    processes = folders.tables_of(config.get("process")) if isinstance(config, Mapping) else []
    if not processes:
        return None
    rest = {name: value for name, value in data["config"].items() if name != "process"}
    others = flattened({"process": [{}, *processes[1:]]})
    return flattened({**data, "config": rest}) | flattened(processes[0]) | others


def read(foreign: Foreign) -> None:
    """Read the settings that depend on several keys."""
    _model(foreign)
    _network(foreign)
    _optimizer(foreign)
    _length(foreign)
    _objective(foreign)
    if foreign.get("type", "") in _SLIDERS:
        _slider(foreign)
    else:
        _datasets(foreign)
        _timesteps(foreign)
    _output(foreign)
    _single_keys(foreign)


def _model(foreign: Foreign) -> None:
    kind = foreign.get("type", "sd_trainer")
    has_network = {"network.type", "network.linear"} & foreign.values.keys()
    if kind not in _TYPES or not has_network:
        raise RequestError(
            f"type={kind} is a process that is not done here, or it has no network",
            fix="give a job of type sd_trainer, diffusion_trainer or concept_slider with a network",
        )
    training.set_model(foreign, *_architecture(foreign))
    bits = foreign.word("model.qtype", "qfloat8").partition("|")[0]
    if foreign.on("model.quantize"):
        precision = foreign.table["bits"].get(bits, "int8")
        foreign.set("memory.base_precision", precision, "model.quantize")
        precisions = ("qfloat8", "float8", "int8", "qint8", "nf4")
        if bits not in precisions and "model.qtype" in foreign.values:
            foreign.is_nearest("model.qtype", f"{bits}: memory.base_precision={precision}")
    training.set_precision(foreign, "train.dtype", missing="fp32")


def _architecture(foreign: Foreign) -> tuple[str, str]:
    """Return the model's name without its variant, and the key that has it."""
    flags: Mapping[str, str] = foreign.table["old_flags"]
    flag = foreign.first_on(*flags)
    name = foreign.word("model.arch", flags[flag] if flag else "sd1")
    key = "model.arch" if foreign.get("model.arch", None) or not flag else flag
    return name.partition(":")[0].lower(), key


def _network(foreign: Foreign) -> None:
    key = "network.type"
    rank_key = foreign.first_on("network.rank") or "network.linear"
    rank: Sourced = (foreign.number(rank_key), rank_key)
    is_lokr = foreign.word(key, "lora").lower() == "lokr"
    if is_lokr and foreign.flag("network.lokr_full_rank", default=True):
        rank = (1e10, "network.lokr_full_rank")
        if rank[1] not in foreign.values:
            foreign.is_nearest(key, "whole matrices there by default, the highest rank here")
    alpha_key = foreign.first_on("network.linear_alpha") or "network.alpha"
    training.read_adapter(foreign, rank=rank, alpha_key=alpha_key)
    conv, conv_alpha_key = foreign.number("network.conv"), "network.conv_alpha"
    if conv and not foreign.is_flow:
        alpha, conv_rank = foreign.get(conv_alpha_key, conv), int(min(training.FULL_RANK, conv))
        training.set_convolutions(foreign, conv_rank, "network.conv", alpha, conv_alpha_key)
    else:
        foreign.set("adapter.targets", "transformer")


def _optimizer(foreign: Foreign) -> None:
    rate = training.read_optimizer(foreign)
    if foreign.settings["optimizer.name"] in ("adamw", "adamw8bit", "prodigy"):
        foreign.set("optimizer.epsilon", 1e-6)
    training.read_arguments(foreign, "train.optimizer_params.")
    word = foreign.word("train.lr_scheduler", "constant")
    default = 1000.0 if word == "constant_with_warmup" else 0.0
    warmup = foreign.number(foreign.table["schedule"]["warmup"], default) or 0.0
    training.read_schedule(foreign, warmup=warmup, steps=foreign.number("train.steps", 1000))
    if word == "linear":
        foreign.set("optimizer.schedule", "constant", "train.lr_scheduler")
        how = "linear rises there from a third of the rate: constant"
        foreign.is_nearest("train.lr_scheduler", how)
    trained = foreign.flag("train.train_text_encoder")
    rates = [(foreign.first_on("train.lr") or THERE, rate or 0.0)]
    training.set_text_encoder(foreign, trained=trained, key="train.train_text_encoder", rates=rates)


def _length(foreign: Foreign) -> None:
    steps = foreign.number("train.steps", 1000)
    if steps:
        foreign.carry("train.steps", "train.steps", int(steps))
    names = ("train.gradient_accumulation", "train.gradient_accumulation_steps")
    times_key = max(names, key=lambda name: foreign.nonzero(name, 1))
    training.set_batch(foreign, "train.batch_size", times_key)


def _objective(foreign: Foreign) -> None:
    gamma_key = foreign.first_on("train.snr_gamma") or "train.min_snr_gamma"
    training.set_snr_weights(foreign, gamma_key)
    key = "train.diff_output_preservation"
    word = foreign.on(f"{key}_class")
    if foreign.on(key) and word is not None and foreign.on("trigger_word") is not None:
        weight = foreign.number(f"{key}_multiplier", 1.0)
        foreign.set("objective.preservation_weight", weight, key)
        foreign.carry("data.class_word", f"{key}_class")
    elif foreign.on(key):
        foreign.lacks(key, True, "needs a trigger word and a class")
    _contrast(foreign)


def _contrast(foreign: Foreign) -> None:
    """Read `do_guidance_loss`, which the interface calls contrastive guidance."""
    key, target_key = "train.do_guidance_loss", "train.guidance_loss_target"
    schedule_key, zero_key = "train.guidance_loss_schedule", "train.do_guidance_loss_cfg_zero"
    prompt_key = "train.unconditional_prompt"
    if not foreign.flag(key):
        return
    wanted = foreign.get(target_key, 3.0)
    try:
        ends = [as_number(each) for each in (wanted if isinstance(wanted, list) else [wanted])]
        scale = sum(ends) / len(ends)
    except (ValueError, ZeroDivisionError) as error:
        foreign.lacks(target_key, wanted, str(error))
        return
    foreign.set("objective.contrast_scale", scale, key, target_key)
    if len(set(ends)) > 1:
        foreign.is_nearest(target_key, f"{shown(wanted)}: {scale:g} for all samples")
    if foreign.is_flow:  # a base with a guidance embedding is told the same scale there
        foreign.set("objective.guidance_scale", scale, key, target_key)
    if foreign.word(schedule_key, "constant") == "sigma":
        foreign.set("objective.contrast_schedule", "sigma", schedule_key)
    elif schedule_key in foreign.values:
        foreign.stays(schedule_key, "is constant")
    foreign.lacks_if_on(zero_key, "the prediction for the empty prompt is used as it is")
    foreign.lacks_if_on(prompt_key, "the prompt that is left out is always the empty one")


def _timesteps(foreign: Foreign) -> None:
    low_key, high_key = "train.min_denoising_steps", "train.max_denoising_steps"
    low, high = foreign.number(low_key, 0), foreign.number(high_key, 999)
    # There they are places in a list of timesteps that begins with pure noise.
    if low and low > 0:
        foreign.carry("objective.max_timestep", low_key, 999 - int(low))
    if high is not None and 0 <= high < 999:
        foreign.carry("objective.min_timestep", high_key, 999 - int(high))
    key = "train.timestep_type"
    word = foreign.word(key, "sigmoid")
    if not foreign.is_flow:
        training.set_timesteps(foreign, "uniform", THERE)
    else:
        if (low or high != 999) and word != "linear":
            how = (
                "the drawn timesteps are squeezed into the range, there those outside are left out"
            )
            foreign.is_nearest(high_key if high_key in foreign.values else low_key, how)
        sigmoid = word in ("sigmoid", "lognorm_blend")
        shift: Sourced = (1.0, THERE)
        if word.endswith("shift"):
            shift = training.shift_by_size(foreign, _architecture(foreign)[0], key)
        training.set_timesteps(foreign, "sigmoid" if sigmoid else "uniform", key, shift=shift)
    key = "train.content_or_style"
    bias = foreign.word(key, "balanced")
    if bias != "balanced":
        mean = 0.7 if bias == "content" else -0.7
        training.set_timesteps(foreign, "logit_normal", key, mean=(mean, key))
        foreign.is_nearest(key, f"{bias}: logit_normal with a mean of {mean:g}")


def _process(foreign: Foreign) -> Mapping[str, Any]:
    """Return the table of a job's one process."""
    return folders.tables_of(foreign.data["config"]["process"])[0]


def _datasets(foreign: Foreign) -> None:
    tables = folders.tables_of(_process(foreign).get("datasets"))
    sizes = _sizes(foreign, tables)
    paths = set()
    for folder in folders.read_folders(foreign, tables, "datasets"):
        paths.add(folder.path)
        numbered = [(path, key) for path, key in folder.references if key[-1].isdigit()]
        if numbered and folder.get("control_path"):
            folder.references = tuple(numbered)
            foreign.stays(folder.name("control_path"), "control_path_1 to control_path_3 count")
        if folder.get("loss_multiplier") == 1:
            folder.settings.pop("weight")
        if folder.regularisation and folder.get("prior_reg"):
            foreign.set("objective.prior", "base", folder.name("prior_reg"))
    key = "model.model_kwargs.match_target_res"
    if "data.reference_dirs" in foreign.settings:
        # There they are as large as they are, up to 1 megapixel, or as the image to learn.
        if foreign.flag(key):
            foreign.stays(key, "reference images are as large as data.resolution")
        else:
            foreign.set("data.reference_resolution", 1024, key if key in foreign.values else THERE)
    elif key in foreign.values:
        foreign.stays(key, "reference images are not used")
    if sizes:
        first = next(iter(sizes.values()))
        folders.set_resolutions(foreign, list(sizes), first)
        different = {str(table.get("resolution", 512)) for table in tables}
        if len(different) > 1 and len(paths) > 1:
            foreign.is_nearest(first, "all folders are trained at all of these resolutions")
    buckets = all(table.get("buckets", True) for table in tables)
    foreign.set("data.buckets", buckets, "datasets[0].buckets")


def _sizes(foreign: Foreign, tables: Sequence[Mapping[str, Any]]) -> dict[tuple[float, float], str]:
    """Return the resolutions of all folders, in pixels, with the key that names each first."""
    sizes: dict[tuple[float, float], str] = {}
    for number, table in enumerate(tables):
        key = f"datasets[{number}].resolution"
        resolution = table.get("resolution", 512)  # [512, 768] are two of them
        for size in resolution if isinstance(resolution, list) else [resolution]:
            try:
                sizes.setdefault(folders.read_size(size), key)
            except ValueError as error:
                foreign.lacks(key, size, str(error))
    return sizes


def _slider(foreign: Foreign) -> None:
    """Read how a slider is trained; the job itself is what it is trained on, with the words in it."""
    foreign.is_dataset = True
    training.set_timesteps(foreign, "uniform", THERE)
    by_images = foreign.get("type", "") == "concept_slider"
    if by_images:
        key = "slider.guidance_strength"
        foreign.set("slider.guidance", foreign.number(key, _SLIDER_STRENGTH), key)
        foreign.is_nearest_to(
            "type",
            "as words alone: there the noise levels are of images, here of what the base draws",
        )
        foreign.carry_if_on("slider.keep_weight", "slider.anchor_strength", default=1.0)
        tables = folders.tables_of(_process(foreign).get("datasets"))
        sizes, said = _sizes(foreign, tables), "a slider is trained on words"
    else:
        foreign.set("slider.guidance", _WORDS_STRENGTH, THERE)
        key = "train.max_denoising_steps"
        foreign.stays(key, "slider.denoising_steps is the same for all samples")
        table = _process(foreign).get("slider")
        listed = table.get("resolutions") if isinstance(table, Mapping) else None
        sizes = {}
        for size in listed if isinstance(listed, list) else []:
            try:
                sizes.setdefault(folders.read_size(size), "slider.resolutions")
            except ValueError as error:
                foreign.lacks("slider.resolutions", size, str(error))
        said = ""
    if sizes:
        folders.set_resolutions(foreign, list(sizes), next(iter(sizes.values())))
    for name in foreign.values:
        if name.startswith("datasets[") and said:
            foreign.stays(name, said)
        elif name.startswith(_SLIDER_WORDS) and name.endswith(_WORDS):
            foreign.stays(name, "is read from this file, which is what the slider is trained on")


def _output(foreign: Foreign) -> None:
    samples = {
        key: value
        for key, value in foreign.values.items()
        if key.startswith("sample.samples[") and key.endswith("].prompt") and value
    }
    prompts = foreign.on("sample.prompts")
    texts = [text for text in prompts if isinstance(text, str)] if isinstance(prompts, list) else []
    if samples or texts:
        word = foreign.word("trigger_word", "")
        chosen = [str(text).replace("[trigger]", word) for text in samples.values() or texts]
        set_prompts(foreign, chosen, *(samples or ["sample.prompts"]))


def _single_keys(foreign: Foreign) -> None:
    """Carry over the keys that count only where they are on, or for some bases or words."""
    if foreign.on("model.is_v_pred"):
        foreign.carry("base.prediction", "model.is_v_pred", "v_prediction")
    if foreign.says("network.type") == "dora":
        foreign.carry("adapter.dora", "network.type", True)
    foreign.carry_if_on("adapter.dropout", "network.dropout")
    if foreign.settings["adapter.kind"] == "lokr":
        foreign.carry_if_on("adapter.lokr_factor", "network.lokr_factor")
    use_key = "train.ema_config.use_ema"
    if foreign.says(use_key) in YES:
        decay_key = "train.ema_config.ema_decay"
        foreign.carry_if_on("train.ema_decay", decay_key, default=0.999, by=use_key)
    if not foreign.is_flow and foreign.on("train.snr_gamma"):
        how = "min_snr: weights of gamma / SNR there grow without bound, here up to 1"
        foreign.is_nearest_to("train.snr_gamma", how)
    key = "train.timestep_type"
    if foreign.is_flow and foreign.on(key) and foreign.says(key) not in _OWN_TIMESTEPS:
        drawn = foreign.settings["objective.timestep_sampling"]
        foreign.is_nearest_to(key, f"{drawn}, without weights")
    _loss(foreign)
    foreign.carry_if_on("data.trigger", "trigger_word")
    foreign.carry_if_on("output.save_every_steps", "save.save_every", default=1000)
    if not foreign.carry_if_on("sampling.every_steps", "train.disable_sampling", 0):
        foreign.carry_if_on("sampling.every_steps", "sample.sample_every")
    push_key, repo_key = "save.push_to_hub", "save.hf_repo_id"
    if foreign.says(push_key) == "true":
        foreign.carry_if_on("output.hub_repo", repo_key, by=push_key)
        if foreign.on(repo_key):
            foreign.carry_if_on("output.hub_private", "save.hf_private", default=False, by=push_key)


def _loss(foreign: Foreign) -> None:
    key = "train.loss_type"
    word = foreign.says(key, "mse")
    if word == "mse":
        foreign.carry_if_on("objective.loss", key, default="mse")
    elif word in ("pseudo_huber", "mae"):
        foreign.carry("objective.loss", key, "smooth_l1")
        foreign.is_nearest_to(key, "objective.loss=smooth_l1, twice as large")
        foreign.carry("objective.huber_delta", key, 0.01)
        foreign.carry("objective.huber_schedule", key, "constant")
    elif foreign.on(key):
        foreign.carry("objective.loss", key, "mse")
        foreign.is_nearest_to(key, "objective.loss=mse")


TRAINERS = (Trainer("ai-toolkit", ("ai_toolkit",), flat, read),)
