"""From a request to a resolved, checked and planned run, without torch; `plan` and `--dry-run` show the result.

Order: hardware -> base and its family -> settings by layers -> dataset -> plan. Only memo files in the
cache folder are written, which save time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer import families
from lora_trainer.common.errors import InputError, MachineError, RequestError
from lora_trainer.common.events import named, shown
from lora_trainer.common.memo import HashMemo
from lora_trainer.common.processes import gc_disabled
from lora_trainer.common.wording import without_secrets
from lora_trainer.config import Priority
from lora_trainer.config.config import (
    flatten,
    setting_info,
    setting_of,
    validation_users,
)
from lora_trainer.config.constraints import typed
from lora_trainer.config.declare import CHUNK_TOKENS
from lora_trainer.config.inputs import (
    EMBEDDED,
    EMBEDDED_EDIT,
    MINIATURES,
    NO_ASSISTANT,
    DataSettings,
)
from lora_trainer.config.layers import (
    AskedFor,
    Resolved,
    SettingsFile,
    lowered_to,
    read_settings_file,
    resolve,
)
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.config.prompt_line import (
    SamplePrompt,
    check_sizes,
    plain_prompt,
    read_prompt,
    seeds,
    strip,
)
from lora_trainer.config.running import Config, RunConfig
from lora_trainer.dataset.buckets import placing, placing_references
from lora_trainer.dataset.caption_rules import (
    MOST_CHUNKS,
    Reading,
    caption_limit,
    max_texts,
    reading_of,
    sample_prompts,
    too_long,
)
from lora_trainer.dataset.json_captions import json_findings
from lora_trainer.dataset.quality import DatasetReport, inspect_images
from lora_trainer.dataset.records import (
    Dataset,
    ImageRecord,
    Reference,
    hold_out,
    regularisation_count,
)
from lora_trainer.dataset.scan import BAD_MASK, cache_folder, read_dataset
from lora_trainer.dataset.slider_file import is_slider_file, share_keeping
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.families.files.assistants import fetch_assistant
from lora_trainer.families.files.hub_files import OnBytes, unheard
from lora_trainer.families.files.locate import describe, identified, locate, with_choices
from lora_trainer.hardware.machine import Hardware, Tier, assume_card, detect, tier
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.lora_file.key_formats import format_for, planned_contents
from lora_trainer.planning.image_size import smaller_sides
from lora_trainer.planning.known_convolutions import known_ways
from lora_trainer.planning.known_pace import known_runs
from lora_trainer.planning.plan import Plan, device_of, plan
from lora_trainer.planning.plan_input import PlanInput, area_of, known_oom

if TYPE_CHECKING:  # it imports torch
    from lora_trainer.training.actions import Action


@dataclass(frozen=True, kw_only=True)
class Request:
    """A user's request; `overrides` are the settings typed on this command line, by dotted key.

    `run_settings` and `run_at_once` (micro-batch by "WIDTHxHEIGHT") belong to the run that is resumed.
    `processes` share each optimizer step, `sharing` of them this machine; the plan is for one process.
    `fetches`: download a base for planning if its name tells too little and the Hub's cache lacks it;
    `on_bytes` is told how far any download is.

    The rest is of a training: `command` are the words typed, for run.json; `watchers` run between steps, before all
    other actions; a run that `is_asked_to_stop` saves and ends.
    """

    dataset: Path
    preset: str = "auto"
    priority: Priority = "balanced"
    settings_file: SettingsFile | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    run_settings: Mapping[str, Any] | None = None
    run_at_once: Mapping[str, int] | None = None
    assumed_vram_gib: float | None = None
    processes: int = 1
    sharing: int = 1
    fetches: bool = False
    on_bytes: OnBytes = unheard
    resume: bool = False
    resume_from: Path | None = None
    strict: bool = False
    command: Sequence[str] = ()
    watchers: Sequence[Action] = ()
    is_asked_to_stop: Callable[[], bool] = lambda: False

    @property
    def _run_settings(self) -> Mapping[str, Any] | None:
        """The settings of the run that is resumed; runs of releases that did not read references go on without."""
        before = self.run_settings
        return before if before is None else {"data.references": "none", **before}

    @property
    def asked(self) -> AskedFor:
        """The layers of settings that the user gives."""
        return AskedFor(
            preset=self.preset,
            config_file=self.settings_file,
            overrides=self.overrides,
            run_settings=self.run_settings,
            is_slider=is_slider_file(self.dataset),
        )

    @classmethod
    def of(
        cls,
        dataset: Path | str,
        *,
        config_file: Path | None,
        settings: Mapping[str, Any],
        **fields: Any,
    ) -> Request:
        """Return the request of a command by the names of its options; raises RequestError for the file."""
        file = None if config_file is None else read_settings_file(config_file)
        return cls(dataset=Path(dataset), settings_file=file, overrides=settings, **fields)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that could start: all it was planned from, the plan, its data and cache folder."""

    inputs: PlanInput
    plan: Plan
    dataset: Dataset
    report: DatasetReport
    trained: tuple[ImageRecord, ...]
    held_out: tuple[ImageRecord, ...]
    cache_root: Path

    @property
    def facts(self) -> BaseFacts:
        """What is known of the base."""
        return self.inputs.facts

    @property
    def family(self) -> Family:
        """The family of the base."""
        return self.inputs.family

    @property
    def hardware(self) -> Hardware:
        """The machine that was planned for."""
        return self.inputs.hardware

    @property
    def resolved(self) -> Resolved:
        """The settings before the plan, with their origins."""
        return self.inputs.resolved

    @property
    def config(self) -> RunConfig:
        """The planned settings."""
        return self.plan.config

    @property
    def identities(self) -> dict[str, str]:
        """The checksum of each part of the base."""
        return {name: part.identity for name, part in self.facts.parts.items()}

    @property
    def at_once_by_size(self) -> dict[str, int]:
        """The planned micro-batch by "WIDTHxHEIGHT" of the bucket, as `Request.run_at_once` takes it."""
        planned = self.plan.images_at_once
        return {f"{width}x{height}": count for (width, height), count in planned.items()}

    @property
    def sample_prompts(self) -> tuple[str, ...]:
        """Prompts of the sample images; captions of held-out images come first."""
        return tuple(prompt.line for prompt in self.drawn_prompts)

    @property
    def drawn_prompts(self) -> tuple[SamplePrompt, ...]:
        """The prompts of the sample images, each with how it is drawn; raises RequestError."""
        return _sample_prompts(self.dataset, (*self.held_out, *self.trained), self.config)

    @property
    def preview_index(self) -> int:
        """The number of the prompt that previews are drawn of: the first with the adapter, at a strength above 0."""
        strengths = [prompt.strength for prompt in self.drawn_prompts]
        return next((at for at, one in enumerate(strengths) if one is None or one > 0), 0)

    @property
    def sample_references(self) -> tuple[tuple[Reference, ...], ...]:
        """The reference images of each sample image.

        A caption brings those of its image; other prompts have those of the first images with references, in turn.
        """
        records = (*self.held_out, *self.trained)
        pairs = [record for record in records if record.references]
        if not pairs:
            return ((),) * len(self.drawn_prompts)
        own = {without_secrets(one.caption): one.references for one in reversed(records)}
        return tuple(
            own.get(prompt.text, pairs[at % len(pairs)].references)
            for at, prompt in enumerate(self.drawn_prompts)
        )

    @property
    def sample_texts(self) -> tuple[str, ...]:
        """The texts that the prompts of the sample images are encoded from, negative ones too."""
        prompts = self.drawn_prompts
        negatives = (prompt.negative for prompt in prompts if prompt.negative is not None)
        return tuple(dict.fromkeys((*(prompt.text for prompt in prompts), *negatives)))


@dataclass(frozen=True, kw_only=True)
class Basis:
    """Everything known before the dataset is read: the hardware, the base's facts and the layered settings."""

    hardware: Hardware
    facts: BaseFacts
    family: Family
    resolved: Resolved


@gc_disabled()
def prepare(request: Request, *, hardware: Hardware | None = None) -> Prepared:
    """Resolve, scan and plan; raises RequestError, InputError or MachineError."""
    basis = _basis(request, hardware)
    settings = basis.resolved.config
    cache_root = cache_folder(settings.data)
    _refuse_impossible(settings, basis)
    if (
        settings.train.init_from is not None and request.run_settings is None
    ):  # a resume does not read it
        _refuse_start(Path(settings.train.init_from), settings, basis)
    dataset = read_dataset(request.dataset, settings.data, basis.facts)
    if _wants_editing(request, dataset, basis):
        basis = _basis(request, hardware, miniature=EMBEDDED_EDIT)
        settings = basis.resolved.config
        dataset = read_dataset(request.dataset, settings.data, basis.facts)
    reading = _reading(request, dataset, basis)
    basis = replace(basis, facts=replace(basis.facts, chunks=reading.chunks))
    trained, held_out = hold_out(
        dataset.records, fraction=settings.data.validation_fraction, seed=settings.train.seed
    )
    _refuse_data(settings, dataset, held_out)
    _refuse_slider(settings, dataset)
    _refuse_references(settings, dataset, basis)
    if any(record.references for record in dataset.records):
        basis = replace(basis, facts=basis.facts.for_references())
    learned = sorted((*trained, *held_out), key=lambda record: record.name)
    used = (*learned, *dataset.regularisation)
    # An epoch of a slider has each of its directions, or each pair of images, once.
    samples = sum(record.repeats for record in trained if not record.goes_along)
    samples += len(dataset.directions)
    smaller = {
        side_px: _placed(used, side_px, data=settings.data, facts=basis.facts)
        for side_px in smaller_sides(basis.facts, basis.family)
        if settings.data.resolution == "auto"
    }
    buckets, by_side = _buckets(used), {side: _buckets(each) for side, each in smaller.items()}
    if dataset.directions:
        buckets = slider_sizes(settings.data, basis.facts.resolution_px)
        by_side = {side_px: slider_sizes(settings.data, side_px) for side_px in smaller}
    plan_input = PlanInput(
        resolved=basis.resolved,
        facts=basis.facts,
        family=basis.family,
        hardware=basis.hardware,
        decided=_decided(reading, basis),
        images=len(trained),
        held_out_count=len(held_out),
        samples_per_epoch=samples,
        fewest_repeats=min((record.repeats for record in trained), default=1),
        regularisation_per_epoch=regularisation_count(
            samples, pool=len(dataset.regularisation), ratio=settings.data.regularisation_ratio
        ),
        buckets=buckets,
        buckets_by_side=by_side,
        references=_references(chain(used, *smaller.values())),
        latents=sum(
            # A mirrored image has an entry of its own in the cache, as its
            # latents are not the mirrored latents.
            len(record.placements)
            * (1 + record.settings(settings.data).flip)
            * (1 + len(record.references))
            for record in used
        ),
        texts=_text_count(dataset, settings)
        + (_seeing_count(used, settings) if basis.facts.sees_references else 0),
        prompts=len(_sample_prompts(dataset, (*held_out, *trained), settings)),
        directions=len(dataset.directions),
        pairs=dataset.pairs,
        keeping=share_keeping(dataset.directions) if settings.slider.keep_weight else 0.0,
        # A resumed run has its own record of out-of-memory fallbacks.
        full_card=known_oom(cache_root, basis.hardware, basis.family.name)
        if request.run_settings is None
        else None,
        processes=request.processes,
        sharing=request.sharing,
        kept_at_once=_kept_at_once(request),
        past_runs=known_runs(
            cache_root,
            basis.hardware,
            gpu=device_of(settings, basis.hardware, sharing=request.sharing),
            family=basis.family.name,
        ),
        fastest_ways=known_ways(
            cache_root,
            basis.hardware,
            gpu=device_of(settings, basis.hardware, sharing=request.sharing),
            family=basis.family.name,
        ),
    )
    made = plan(plan_input)
    side_px = made.config.data.resolution
    if settings.data.resolution == "auto" and side_px in plan_input.buckets_by_side:
        # The plan has chosen a smaller size than the base's own, at which the images were placed.
        trained, held_out, records, regularisation = (
            _placed(each, side_px, data=settings.data, facts=basis.facts)
            for each in (trained, held_out, dataset.records, dataset.regularisation)
        )
        held_out = tuple(replace(one, placements=one.placements[:1]) for one in held_out)
        dataset = replace(dataset, records=records, regularisation=regularisation)
        plan_input = replace(plan_input, buckets=plan_input.buckets_by_side[side_px])
    prepared = Prepared(
        inputs=plan_input,
        plan=made,
        dataset=dataset,
        report=_report(dataset, settings.data, reading, basis),
        trained=trained,
        held_out=held_out,
        cache_root=cache_root,
    )
    refuse_strengths(prepared.drawn_prompts, settings.adapter)
    check_sizes(prepared.drawn_prompts, step_px=basis.facts.bucket_step_px, planned_side_px=side_px)
    return prepared


def _sample_prompts(
    dataset: Dataset, records: Iterable[ImageRecord], config: Config[Any]
) -> tuple[SamplePrompt, ...]:
    """Return the prompts of the sample images: those of the settings, else captions or the targets of a slider.

    Of a slider each is drawn at several strengths.
    """
    captions = (
        *(direction.target for direction in dataset.directions),
        *(record.caption for record in records),
    )
    read = read_prompt if config.sampling.prompts else plain_prompt
    prompts = tuple(read(line) for line in sample_prompts(captions, config))
    if not dataset.is_slider:
        return prompts
    own_seeds = seeds(prompts, config.sampling.seed)
    return tuple(
        drawn
        for prompt, seed in zip(prompts, own_seeds, strict=True)
        for drawn in strip(prompt, seed=seed)
    )


def slider_sizes(data: DataSettings, side_px: int) -> list[tuple[int, int]]:
    """Return the (width, height) in pixels of the squares that a slider is trained at."""
    own_px = side_px if data.resolution == "auto" else data.resolution
    return [(side, side) for side in (own_px, *data.more_resolutions)]


def _buckets(records: Iterable[ImageRecord]) -> list[tuple[int, int]]:
    """Return the (width, height) of each placement in pixels."""
    return [placement.bucket.size_px for record in records for placement in record.placements]


def _references(
    records: Iterable[ImageRecord],
) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """Return the sizes of the references that go with an image of each bucket, the largest ones."""
    largest: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
    for record in records:
        for number, placement in enumerate(record.placements if record.references else ()):
            sizes = tuple(one.placements[number].bucket.size_px for one in record.references)
            size_px = placement.bucket.size_px
            largest[size_px] = max(largest.get(size_px, ()), sizes, key=area_of)
    return largest


def _placed(
    records: Iterable[ImageRecord], side_px: int, *, data: DataSettings, facts: BaseFacts
) -> tuple[ImageRecord, ...]:
    """Return the records as they are trained at another `data.resolution`."""
    data = data.model_copy(update={"resolution": side_px})
    place = placing(data, resolution_px=side_px, step_px=facts.bucket_step_px)
    place_reference = placing_references(data, facts=facts)

    def placed(record: ImageRecord) -> ImageRecord:
        placements = place(record.width_px, record.height_px)
        references = tuple(
            replace(one, placements=place_reference(one.width_px, one.height_px, placements))
            for one in record.references
        )
        return replace(record, placements=placements, references=references)

    return tuple(map(placed, records))


def prepare_with_base(request: Request, *, hardware: Hardware | None = None) -> Prepared:
    """Plan a run with its base on this machine, its parts identified by content, downloading it if needed.

    After a download the run is planned again, because the files tell more than the base's name: captions
    are counted with its tokenizer.
    """
    prepared = prepare(request, hardware=hardware)
    if prepared.facts.layout is None:
        locate(prepared.config.base, on_bytes=request.on_bytes)
        prepared = prepare(request, hardware=hardware)
    config = prepared.config
    if config.base.assistant != NO_ASSISTANT:
        fetch_assistant(config.base.assistant, on_bytes=request.on_bytes)
    facts = with_choices(
        locate(config.base, on_bytes=request.on_bytes),
        config.base,
        zero_terminal_snr=prepared.facts.release.zero_terminal_snr,
    )
    memo = HashMemo(prepared.cache_root)
    # The plan's settings are decided, and what was assumed for them stays said.
    release = replace(facts.release, assumed=prepared.facts.release.assumed)
    facts = replace(facts, release=release, chunks=prepared.facts.chunks)
    if prepared.facts.has_reference_layers:
        facts = facts.for_references()
    facts = identified(facts, memo)
    memo.table.save()
    return replace(prepared, inputs=replace(prepared.inputs, facts=facts))


def _text_count(dataset: Dataset, config: Config) -> int:
    """Return the largest possible number of different texts that the captions give."""
    different = {
        (record.written, record.folder, record.regularisation): record
        for record in (*dataset.records, *dataset.regularisation)
    }
    return sum(
        max_texts(record.written, settings=record.settings(config.data))
        * (1 if record.regularisation or not config.objective.preservation_weight else 2)
        for record in different.values()
    ) + len({text for direction in dataset.directions for text in direction.texts})


def _seeing_count(records: Iterable[ImageRecord], config: Config) -> int:
    """Return how many texts are read with references at most: those of each view of an image, the empty one too."""
    return sum(
        (1 + max_texts(record.written, settings=record.settings(config.data)))
        * len(record.placements)
        * (1 + record.settings(config.data).flip)
        for record in records
        if record.references
    )


def _kept_at_once(request: Request) -> Mapping[tuple[int, int], int] | None:
    """Return the micro-batches of the resumed run, None to plan them anew.

    Other micro-batches round differently, and a new plan would depend on the memory that is free today.
    """
    before = request.run_settings
    if before is None or request.run_at_once is None:
        return None
    typed = [key for key, value in request.overrides.items() if before.get(key) != value]
    if any(setting_info(setting_of(key)).handling.replans for key in typed):
        return None
    return {
        (int(width), int(height)): count
        for size, count in request.run_at_once.items()
        for width, _, height in [size.partition("x")]
    }


def examine(
    request: Request, *, hardware: Hardware | None = None
) -> tuple[DatasetReport, Mapping[str, Any] | None]:
    """Return the dataset's report for `check`, and the longest caption that the base reads, where it is known.

    Raises RequestError, InputError or MachineError.
    """
    basis = _basis(request, hardware)
    # No limit of bad images here: `check` lists them all, where a training would refuse.
    data = basis.resolved.config.data.model_copy(update={"max_bad_fraction": 1.0})
    dataset = read_dataset(request.dataset, data, basis.facts, checks_only=True)
    if _wants_editing(request, dataset, basis):
        basis = _basis(request, hardware, miniature=EMBEDDED_EDIT)
        dataset = read_dataset(request.dataset, data, basis.facts, checks_only=True)
    reading = _reading(request, dataset, basis)
    is_auto = basis.family.text.chunks and data.caption_tokens == "auto"
    room = MOST_CHUNKS if is_auto else reading.chunks
    report = _report(dataset, data, reading, basis, each=True)
    return report, caption_limit(basis.facts, chunks=room)


def _report(
    dataset: Dataset, data: DataSettings, reading: Reading, basis: Basis, *, each: bool = False
) -> DatasetReport:
    if dataset.directions:
        findings = dataset.findings
        return DatasetReport(
            images=0, score=1.0, parts={}, findings=findings, buckets={}, pictures=()
        )
    more = (
        *too_long(reading, facts=basis.facts),
        *json_findings(dataset.records, family=basis.family),
    )
    return inspect_images(dataset, settings=data, more=more, each=each)


def _reading(request: Request, dataset: Dataset, basis: Basis) -> Reading:
    """Return the number of chunks of captions; a run begun by a release without the setting keeps one chunk."""
    before = request.run_settings
    if before is not None and "data.caption_tokens" not in {**before, **request.overrides}:
        return Reading(chunks=1, reason="the run began with it")
    return reading_of(
        (*dataset.records, *dataset.regularisation),
        config=basis.resolved.config,
        facts=basis.facts,
        family=basis.family,
        cache_root=cache_folder(basis.resolved.config.data),
    )


def _wants_editing(request: Request, dataset: Dataset, basis: Basis) -> bool:
    """Say whether nobody named a base, the miniature was taken, and the dataset has pairs, which that does not read."""
    is_chosen = request.asked.value("base.model") in (None, "auto")
    data = basis.resolved.config.data
    return is_chosen and basis.facts.source == EMBEDDED and bool(_unread(dataset, data))


def _unread(dataset: Dataset, data: DataSettings) -> list[str]:
    """Return where the dataset has references that are wanted and that its base does not read."""
    if data.references != "files":
        return []
    found = [str(one.file) for one in dataset.findings if one.kind == "unread-references"]
    return found or list(data.reference_dirs)


def _basis(request: Request, hardware: Hardware | None, *, miniature: str = EMBEDDED) -> Basis:
    hardware = hardware or detect()
    if request.assumed_vram_gib is not None:
        hardware = assume_card(hardware, vram_gib=request.assumed_vram_gib)
    asked = request.asked
    card = (
        None
        if asked.value("hardware.device") == "cpu"
        else hardware.accelerator(sharing=request.sharing)[0]
    )
    source = asked.value("base.model")
    if source in (None, "auto"):
        source = (
            next(iter(families.family(families.DEFAULT_FAMILY).releases)) if card else miniature
        )
    base = asked.base(model=source)
    try:
        facts = describe(base)
    except (InputError, MachineError):  # the base, or a part of it, is not on this machine
        if not request.fetches:
            raise
        facts = locate(base, on_bytes=request.on_bytes)
    family = families.family(facts.family)
    # In the default family, tier `cpu` is the recipe of the embedded bases. A real base of that family on a
    # processor takes the tier of the smallest GPUs: slow, but correct.
    preset_tier: Tier = "cpu"
    if source not in MINIATURES and card is not None:
        preset_tier = tier(card.total_bytes)
    elif source not in MINIATURES and family.name == families.DEFAULT_FAMILY:
        preset_tier = "6-8"
    resolved = resolve(asked, family=family.name, tier=preset_tier, priority=request.priority)
    resolved = lowered_to(resolved, resolution_px=facts.resolution_px)
    zero = resolved.config.objective.zero_terminal_snr
    facts = with_choices(facts, resolved.config.base, zero_terminal_snr=zero)
    return Basis(hardware=hardware, facts=facts, family=family, resolved=resolved)


def _refuse_impossible(settings: Config, basis: Basis) -> None:
    """Raise RequestError for settings that this family does not support, before the dataset is read."""
    text, adapter = basis.family.text, settings.adapter
    if not adapter.refiners and not basis.family.traits.refiners:
        raise RequestError(
            f"adapter.refiners=false, but {basis.facts.source} (family {basis.family.name}) has no refiners",
            fix="leave adapter.refiners out",
        )
    whose = f"the text encoders of {basis.facts.source} (family {basis.family.name})"
    for key, value, is_possible in (
        ("adapter.text_encoder", adapter.text_encoder, text.trainable),
        ("adapter.new_tokens", adapter.new_tokens, text.new_token_keys),
        ("data.emphasis", settings.data.emphasis, text.prompt_weights),
    ):
        if value and not is_possible:
            raise RequestError(
                f"{key}={typed(value)} is not possible with {whose}", fix=f"leave {key} out"
            )
    format_for(basis.family, settings.output.format, planned_contents(settings.adapter))


def _refuse_start(file: Path, settings: Config, basis: Basis) -> None:
    """Raise InputError or RequestError for a train.init_from whose header shows that it cannot be used.

    `Adapter.load_tensors` compares layer by layer, which needs the loaded base.
    """
    name = f"train.init_from {file.name}"
    try:
        found = inspect_file(file)
    except InputError as error:
        raise InputError(f"train.init_from: {error.found}", fix="give a LoRA file") from None
    if found.family not in (basis.family.name, "unknown"):
        raise InputError(
            f"{name} is a LoRA of {found.family}, and the base is of family {basis.family.name}",
            fix="give a LoRA of this family, or the base that it was trained on",
        )
    kinds = set(found.kinds) - {"dora"}
    if found.kinds and kinds != {settings.adapter.kind}:
        raise RequestError(
            f"{name} holds {' and '.join(found.kinds)}, and this run trains {settings.adapter.kind}",
            fix=f"use --set adapter.kind={min(kinds)}, or make a LoRA of it with `lora-train resize`",
        )
    rank, patterns = settings.adapter.rank, settings.adapter.rank_pattern
    if settings.adapter.kind == "lora" and found.rank is not None and not patterns:
        widths = {rank, settings.adapter.conv_rank or rank}
        if not min(widths) <= found.rank[0] <= found.rank[1] <= max(widths):
            raise RequestError(
                f"{name} has rank {' to '.join(dict.fromkeys(f'{each:g}' for each in found.rank))}, and this "
                f"run trains rank {rank}",
                fix=f"use --set adapter.rank={found.rank[1]:g}, or `lora-train resize {file} OUT --rank {rank}`",
            )


def _refuse_data(settings: Config, dataset: Dataset, held_out: Sequence[ImageRecord]) -> None:
    """Raise InputError for masks that cannot be used, RequestError for settings that need held-out images."""
    if masks := [finding for finding in dataset.findings if finding.kind == BAD_MASK]:
        # `check` lists them, but a training would learn from them.
        bad = "; ".join(f"{shown(finding.file or '')} {finding.what}" for finding in masks)
        raise InputError(f"masks cannot be used: {bad}", fix=masks[0].advice)
    values = flatten(settings)
    keys = " and ".join(key for key in validation_users() if values[key])
    if keys and not held_out:
        raise RequestError(
            f"the validation loss is needed for {keys}, but no image is held out for it",
            fix=f"add images, raise data.validation_fraction, or leave {keys} out",
        )


def _refuse_slider(settings: Config, dataset: Dataset) -> None:
    """Raise RequestError for settings with which a slider cannot be trained."""
    if not dataset.is_slider:
        return
    adapter, objective, in_words = settings.adapter, settings.objective, bool(dataset.directions)
    for key, value, is_possible, reason in (
        ("adapter.kind", adapter.kind, adapter.kind != "oft", "a rotation has no strength -1"),
        ("adapter.dora", adapter.dora, not adapter.dora, "its norms have no strength -1"),
        ("adapter.new_tokens", adapter.new_tokens, not adapter.new_tokens, "it has no new word"),
        (
            "objective.contrast_scale",
            objective.contrast_scale,
            objective.contrast_scale == 1 or not in_words,
            "its target is made of the base's predictions",
        ),
        (
            "objective.input_perturbation",
            objective.input_perturbation,
            not objective.input_perturbation or not in_words,
            "it has no image to which more noise could be added",
        ),
    ):
        if not is_possible:
            raise RequestError(
                f"{key}={typed(value)} is not possible for a slider: {reason}",
                fix=f"leave {key} out",
            )


def refuse_strengths(prompts: Iterable[SamplePrompt], adapter: AdapterSettings) -> None:
    """Raise RequestError for prompts with a strength of an adapter that has none."""
    if adapter.kind != "oft" and not adapter.dora:
        return
    if asked := [prompt.line for prompt in prompts if prompt.strength is not None]:
        kind = "DoRA" if adapter.dora else "OFT"
        raise RequestError(
            f"the sample prompt {shown(asked[0])!r} has a strength, and {kind} is drawn at strength 1 in training",
            fix="leave --m out, or draw it with `lora-train sample --strength` afterwards",
        )


def _refuse_references(settings: Config, dataset: Dataset, basis: Basis) -> None:
    """Raise RequestError or InputError for reference images that the base does not read, or reads otherwise."""
    facts, data = basis.facts, settings.data
    reads = facts.references
    if dataset.directions and reads is not None and reads.least:
        raise InputError(
            f"{facts.source} draws nothing without a reference image, and a slider has none",
            fix="use a base that draws from text alone",
        )
    if reads is None and (unread := _unread(dataset, data)):
        raise RequestError(
            f"{shown(unread[0])} holds reference images, which {facts.source} (family {facts.family}) does not read",
            fix=f"use a base that edits images (families {', '.join(families.editing())}; to try it out, the "
            f"built-in miniature: --base {EMBEDDED_EDIT}), or --set data.references=none to train without them",
        )
    if reads is None:
        return
    most = max((len(record.references) for record in dataset.records), default=0)
    if most > reads.most:
        name = next(one.name for one in dataset.records if len(one.references) == most)
        raise InputError(
            f"{shown(name)} has {most} reference images, and {facts.source} reads at most {reads.most}",
            fix="take some of the folders of references away",
        )
    alone = [one.name for one in dataset.records if len(one.references) < reads.least]
    if alone:
        raise InputError(
            f"{facts.source} draws nothing without a reference image, and {len(alone)} images have none: "
            + named(alone),
            fix="give each a file of its name in references/",
        )
    if data.reference_resolution is not None and reads.as_channels:
        raise RequestError(
            f"data.reference_resolution={data.reference_resolution}, but {facts.source} reads a reference as large "
            "as the image",
            fix="leave data.reference_resolution out",
        )
    # Left out of a U-Net, a reference is zeros, which it learns for the guidance by the image.
    if data.reference_dropout and reads.least and not reads.as_channels:
        raise RequestError(
            f"data.reference_dropout={data.reference_dropout:g}, but {facts.source} draws nothing "
            "without a reference image",
            fix="leave data.reference_dropout out",
        )


def _decided(reading: Reading, basis: Basis) -> dict[str, tuple[Any, str]]:
    """Return (value, reason) of the settings that the base and the captions decide alone."""
    config, family, decided = basis.resolved.config, basis.family, dict[str, tuple[Any, str]]()
    if config.output.format == "auto":
        decided["output.format"] = (
            format_for(family, "auto", planned_contents(config.adapter)),
            f"the format that most programs read for {family.name}",
        )
    if config.base.model == "auto":  # so that a resume always loads the same base
        decided["base.model"] = (
            basis.facts.source,
            "no base was chosen, and without a GPU any other takes hours or days"
            if basis.facts.source in MINIATURES
            else "no base was chosen, and this is the usual one with a GPU",
        )
    if reading.reason:  # else the user set it; encoders without chunks keep auto
        tokens = reading.chunks * CHUNK_TOKENS if family.text.chunks else "auto"
        decided["data.caption_tokens"] = (tokens, reading.reason)
    return decided
