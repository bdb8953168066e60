"""The settings of a run as a difference from its preset, each with who decided it and why.

Input: run.json. Output: escaped markup. The preset is resolved again from the names that run.json
has; where that is not possible, what is not at its default counts as the difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.config import PRIORITIES
from lora_trainer.config.config import (
    SettingInfo,
    all_settings,
    build_config,
    flatten,
    retired_in,
    without_retired,
)
from lora_trainer.config.inputs import MINIATURES
from lora_trainer.config.layers import COMMAND_LINE, RESUMED, TIERS, AskedFor, Origin, resolve
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.plan_record import PlanRecord
from lora_trainer.reporting.report import value_text
from lora_trainer.reporting.run_record import RunRecord

from .markup import inline, join, named, setting_said, table, tag
from .server.translation import Words

# What a draft has fields of its own for, or a new run must not share.
_NOT_CLONED = ("base.model", "output.folder", "output.name")
_OF_THE_MACHINE = ("hardware.", "memory.")
_BY_YOU = (COMMAND_LINE, "config ")
_DECIDERS = {COMMAND_LINE: "you", "planner": "the planner", RESUMED: "this run, as it began"}
_HEAD = ("setting", "value", "the preset has", "decided by", "why")
_ALL_HEAD = ("setting", "value", "decided by", "why", "what it does")


def settings_html(run: RunRecord, said: Words) -> Html:
    """Return what differs from the preset, what was typed first, and all settings folded away."""
    values, plan = run.settings, run.plan
    if not values:
        return tag("p", "No settings were recorded yet.", class_="quiet")
    shown = _Settings(
        values=values,
        origins=run.origins,
        preset=preset_values(plan),
        known={info.key: info for info in all_settings()},
        said=said,
    )
    changed = [key for key in values if shown.preset.get(key) != values[key]]
    typed = [key for key in changed if shown.layer(key).startswith(_BY_YOU)]
    decided = [key for key in changed if key not in typed]
    name = f"{plan.preset}, priority {plan.priority}" if plan.preset else "unknown"
    gone = [
        f"{k}={values[k]}" for k in (*retired_in(values, "refused"), *retired_in(values, "result"))
    ]
    return join(
        (
            tag("p", f"Preset {name}: {len(changed)} of {len(values)} settings differ from it."),
            tag("p", "The miniature is a small model of this family.", class_="quiet")
            if run.base.source in MINIATURES and plan.preset
            else None,
            tag(
                "p",
                f"Of an earlier version: {', '.join(gone)}. A new training is without it.",
                class_="notice",
            )
            if gone
            else None,
            _titled("Chosen by you", [shown.difference(key) for key in typed]),
            _titled(
                "Decided for this machine, base and dataset",
                [shown.difference(key) for key in decided],
            ),
            tag(
                "details",
                tag("summary", f"All {len(values)} settings"),
                table(_ALL_HEAD, [shown.whole(key) for key in values], class_="settings"),
            ),
        )
    )


def preset_values(plan: PlanRecord) -> Mapping[str, Any]:
    """Return all settings as the preset of a plan has them, the defaults where it is unknown."""
    family, tier, priority = plan.family, plan.tier, plan.priority
    values = {info.key: info.default for info in all_settings()}
    if tier in TIERS and priority in PRIORITIES:
        try:
            resolved = resolve(
                AskedFor(),
                family=family,
                tier=tier,
                priority=priority,
            )
            values = flatten(resolved.config)
        except LoraTrainError:  # of another version: a family that does not exist any more
            pass
    plain: Mapping[str, Any] = json.loads(json.dumps(values))
    return plain


def chosen_settings(record: RunRecord) -> dict[str, Any]:
    """Return the settings that somebody chose for a run.

    A resumed run no longer says who chose what: there all that differ from the preset count, but those
    that belong to the machine.
    """
    origins, preset = record.origins, preset_values(record.plan)
    chosen: dict[str, Any] = {}
    for key, value in without_retired(record.settings).items():
        layer = origins[key].layer if key in origins else ""
        kept = layer == RESUMED and value != preset.get(key) and not key.startswith(_OF_THE_MACHINE)
        if key in _NOT_CLONED or not (kept or layer.startswith(_BY_YOU)):
            continue
        try:
            build_config({**chosen, key: value})
        except LoraTrainError:  # of another version
            continue
        chosen[key] = value
    return chosen


def compared_settings(record: RunRecord) -> dict[str, str]:
    """Return the settings of a run by their labels, without those of its name, its machine and its samples."""
    left_out = (*_NOT_CLONED[1:], *_OF_THE_MACHINE, "output.", "sampling.")
    values = record.settings
    return {
        info.label: value_text(values[info.key])
        for info in all_settings()
        if info.key in values and not info.key.startswith(left_out)
    }


def _titled(title: str, rows: Sequence[Sequence[str]]) -> Html | None:
    return join((tag("h3", title), table(_HEAD, rows, class_="settings"))) if rows else None


@dataclass(frozen=True, kw_only=True)
class _Settings:
    values: Mapping[str, Any]
    origins: Mapping[str, Origin]
    preset: Mapping[str, Any]
    known: Mapping[str, SettingInfo]
    said: Words

    def layer(self, key: str) -> str:
        return self._origin(key).layer

    def _origin(self, key: str) -> Origin:
        return self.origins.get(key, Origin(layer=""))

    def difference(self, key: str) -> tuple[str, ...]:
        before = self._text(key, self.preset[key]) if key in self.preset else ""
        value = self._text(key, self.values[key])
        return self._name(key), value, before, self._decider(key), self._reason(key)

    def whole(self, key: str) -> tuple[str, ...]:
        value = self._text(key, self.values[key])
        return self._name(key), value, self._decider(key), self._reason(key), self._doc(key)

    def _name(self, key: str) -> Html:
        if key not in self.known:
            return tag("code", key)
        help_text = self.said.message(named(self.known[key].doc)).replace("`", "")
        return tag("span", setting_said(key, self.said), title=help_text)

    def _text(self, key: str, value: Any) -> Html:
        unit = self.known[key].unit if key in self.known else ""
        return tag("span", value_text(value, unit), translate="no")

    def _decider(self, key: str) -> str:
        layer = self.layer(key)
        if layer.startswith("config "):
            return f"your file {layer.removeprefix('config ')}"
        if layer.startswith("preset "):
            return f"preset {layer.removeprefix('preset ')}"
        return _DECIDERS.get(layer, layer)

    def _doc(self, key: str) -> Html:
        """Return the help of a setting in the language of the reader, which knows it as a whole."""
        return inline(self.said.message(named(self.known[key].doc)) if key in self.known else "")

    def _reason(self, key: str) -> Html:
        """Return the reason that the planner has written down, which is English in every language."""
        reason = self._origin(key).reason
        return tag("span", inline(reason), lang="en") if reason else Html("")
