"""When something was or will be, in words that each language has its own order for.

Inputs: Unix times. Outputs: English texts in this machine's time zone, such as `1 Dec 2026, 00:36`, which
`Words.message` says in the language of the reader.
"""

from __future__ import annotations

import time

# As the languages know them; strftime's are those of the machine's locale.
_DAYS = (
    "{#} Jan {#}",
    "{#} Feb {#}",
    "{#} Mar {#}",
    "{#} Apr {#}",
    "{#} May {#}",
    "{#} Jun {#}",
    "{#} Jul {#}",
    "{#} Aug {#}",
    "{#} Sep {#}",
    "{#} Oct {#}",
    "{#} Nov {#}",
    "{#} Dec {#}",
)


def day_text(at_s: float) -> str:
    """Return a day, `1 Dec 2026`."""
    at = time.localtime(at_s)
    return _DAYS[at.tm_mon - 1].replace("{#}", "{}").format(at.tm_mday, at.tm_year)


def moment_text(at_s: float) -> str:
    """Return a day and a time of day, `1 Dec 2026, 00:36`, which tells two of one day apart."""
    return f"{day_text(at_s)}, {time.strftime('%H:%M', time.localtime(at_s))}"


def clock_text(at_s: float, *, now_s: float) -> str:
    """Return a time of day, with its date where it is another day."""
    at, now = time.localtime(at_s), time.localtime(now_s)
    is_today = (at.tm_year, at.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M", at) if is_today else moment_text(at_s)
