"""The setting that mends a run which ended because of its settings, read from the line of its end.

Input: a look at the run and the settings that somebody chose for it. Output: the setting and its new value,
for a button that trains again with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lora_trainer.config.config import SettingInfo, all_settings
from lora_trainer.reporting.run_record import RunRecord

from .run_settings import chosen_settings, preset_values
from .run_state import Look
from .server.language import ENGLISH
from .server.translation import Words
from .setting_text import text_of

_SET = re.compile(r"--set[ =](?P<key>[a-z_]+\.[a-z0-9_]+)=(?P<value>[^\s,;]+)")


@dataclass(frozen=True, kw_only=True)
class Mend:
    """A setting that is to be typed as `text`, or left to the preset, whose value that is."""

    setting: SettingInfo = field(repr=False)
    text: str
    is_usual: bool = False

    def said(self, _: Words) -> str:
        """Return what the button says."""
        name = _(self.setting.label)
        if _.code == ENGLISH:  # a noun of some languages is capital within a sentence, too
            name = name.lower()
        if not self.is_usual:
            return _("Train again with {text} {#}", name, self.text)
        if self.text in ("", "auto"):
            return _("Train again, {text} as usual", name)
        return _("Train again with the usual {text}, {#}", name, self.text)


def mend_of(seen: Look, record: RunRecord) -> Mend | None:
    """Return what the message of a failed run advises to change; None where it names no setting.

    `record` is run.json. A setting somebody chose that the message names is left to the preset where that is advised.
    """
    if seen.status.state != "failed":
        return None
    what, _, fix = seen.status.message.partition(" Fix: ")
    known = {info.key: info for info in all_settings()}
    if "leave" in fix:
        chosen = chosen_settings(record)
        named = [key for key in chosen if key in known and key in f"{what} {fix}"]
        if named:
            usual = preset_values(record.plan).get(named[0])
            return Mend(
                setting=known[named[0]], text=text_of(known[named[0]], usual), is_usual=True
            )
    advised = _SET.search(fix)
    if advised is None or advised["key"] not in known:
        return None
    return Mend(setting=known[advised["key"]], text=advised["value"].rstrip("."))
