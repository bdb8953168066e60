"""What `lora-train plan` says of a draft, asked once for the same words and images.

Input: drafts. Output: the answer of the command, which takes about a second; one command at a time,
so that two tabs do not compute the same twice. Free memory changes, so an answer ages.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from .drafts import Draft
from .launch import Answer, Words, ask, plan_words
from .workplace import Workplace

_KEPT = 64
_FRESH_S = 60.0


@dataclass(frozen=True, kw_only=True)
class _Aged:
    answer: Answer
    at_s: float


class Plans:
    """The plans of the last drafts that were asked for."""

    def __init__(
        self,
        work: Workplace,
        *,
        ask: Callable[[Words], Answer] = ask,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work, self._ask, self._clock_s = work, ask, clock_s
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[Words, int], _Aged] = OrderedDict()

    def of(self, draft: Draft) -> Answer:
        """Return the plan of a draft; raises RequestError or InputError for what cannot be asked."""
        words = plan_words(draft, self._work)
        key = (words, self._work.folder(draft.dataset).stat().st_mtime_ns)
        with self._lock:
            kept = self._answers.pop(key, None)
            now_s = self._clock_s()
            if kept is None or now_s - kept.at_s > _FRESH_S:
                kept = _Aged(answer=self._ask(words), at_s=now_s)
            self._answers[key] = kept
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
            return kept.answer
