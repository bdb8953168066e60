"""The form of a setting follows from its schema, and every setting has one."""

from __future__ import annotations

from typing import Any

import pytest

from lora_trainer.config.config import all_settings
from lora_trainer.config.forms import Form, form_of, label_of

FORMS = {info.key: info.form for info in all_settings()}


@pytest.mark.parametrize(
    ("key", "form", "allowed"),
    [
        ("data.flip", Form(kind="switch"), ""),
        ("adapter.kind", Form(kind="choice", words=("lora", "loha", "lokr", "oft")), ""),
        (
            "objective.zero_terminal_snr",
            Form(kind="choice", words=("auto", True, False)),
            "",
        ),
        (
            "data.resolution",
            Form(kind="number", words=("auto",), whole=True, low=16, high=4096),
            "a whole number from 16 to 4,096 or auto",
        ),
        (
            "objective.min_snr_gamma",
            Form(kind="number", low=0, high=100, above_low=True, nullable=True),
            "a number above 0 to 100 or empty: none",
        ),
        (
            "optimizer.beta1",
            Form(kind="number", low=0.0, high=1.0, below_high=True),
            "a number from 0 below 1",
        ),
        (
            "train.seed",
            Form(kind="number", whole=True, low=0, high=2**53 - 1),
            "a whole number from 0 to 9,007,199,254,740,991",
        ),
        ("base.vae", Form(kind="text", nullable=True), "empty: none"),
        ("sampling.prompts", Form(kind="list"), ""),
        ("adapter.rank_pattern", Form(kind="mapping"), ""),
    ],
)
def test_forms(key: str, form: Form, allowed: str) -> None:
    assert FORMS[key] == form
    assert FORMS[key].allowed == allowed


def test_a_type_that_no_form_has_is_a_bug() -> None:
    schema: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    with pytest.raises(ValueError, match="too many"):
        form_of(schema)


@pytest.mark.parametrize(
    ("name", "unit", "label"),
    [
        ("min_snr_gamma", "", "Min SNR gamma"),
        ("cache_max_gib", "GiB", "Cache max"),
        ("rslora", "", "rsLoRA"),
        ("init", "", "Start"),
        ("process_timeout_s", "s", "Process timeout"),
    ],
)
def test_labels(name: str, unit: str, label: str) -> None:
    assert label_of(name, unit=unit) == label


def test_labels_of_a_section_differ() -> None:
    infos = all_settings()
    assert len({(info.section, info.label) for info in infos}) == len(infos)
