"""The pairs of images of a slider: what strength 1 leads to lies in `more/`, what -1 leads to in `less/`.

    age/more/anna.png   age/more/anna.txt
    age/less/anna.png

Images of one name are a pair and have one caption. Both folders lie side by side, in the dataset or in subfolders of it
(`faces/more`, `faces/less`); `10_more` and `10_less` are seen ten times an epoch. Both images of a pair are trained in
the same step with the same noise, each at its own strength, so that what they have in common does not become part of
the slider (as ai-toolkit's reference sliders and the visual sliders of Gandikota et al. 2023, arXiv 2311.12092,
section 4.2, do).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lora_trainer.common.events import Finding
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import same_name, split_name
from lora_trainer.dataset.records import ImageRecord, finding_of_all

_SIDE = re.compile(r"(?:[0-9]+_)?(more|less)", re.IGNORECASE)
_STRENGTH = {"more": 1.0, "less": -1.0}


def paired(
    records: Sequence[ImageRecord], settings: DataSettings
) -> tuple[tuple[ImageRecord, ...], list[Finding]]:
    """Return the records of a dataset, those of a slider's pairs with their strengths, and findings about them.

    What is not one of a pair is left out of a slider, unless it is for regularisation. Without a pair all records are
    returned as they are.
    """
    sides: dict[str, dict[tuple[str, str], ImageRecord]] = {"more": {}, "less": {}}
    for record in records:
        if side := _side_of(record.folder):
            where, which = side
            stem = same_name(split_name(record.name.rpartition("/")[2])[0])
            sides[which].setdefault((where, stem), record)
    more, less = sides["more"], sides["less"]
    pairs = more.keys() & less.keys()
    if not pairs:
        alone = [record.name for record in (*more.values(), *less.values())]
        return tuple(records), finding_of_all("slider-pairs.none", alone if more and less else [])
    of_pairs = {record.name: record for key in pairs for record in _pair(more[key], less[key])}
    kept = [
        of_pairs.get(record.name, record)
        for record in records
        if record.name in of_pairs or settings.is_regularisation(record.folder)
    ]
    names = {record.name for record in kept}
    left_out = [record.name for record in records if record.name not in names]
    return tuple(kept), finding_of_all("slider-pairs.alone", left_out)


def _side_of(folder: str) -> tuple[str, str] | None:
    """Return where a folder of one side lies and which side it is; None for another folder."""
    where, _, name = folder.rpartition("/")
    match = _SIDE.fullmatch(name)
    return match and (where, match[1].lower())


def _pair(more: ImageRecord, less: ImageRecord) -> Iterator[ImageRecord]:
    """Yield both images of a pair, with one caption: that of `more`, else that of `less`."""
    said = more if more.caption_source or not less.caption_source else less
    for record, strength in ((more, _STRENGTH["more"]), (less, _STRENGTH["less"])):
        yield replace(
            record,
            written=said.written,
            caption=said.caption,
            caption_source=said.caption_source,
            repeats=more.repeats,
            strength=strength,
            pair=more.sample_ids()[0],
        )
