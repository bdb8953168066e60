"""Keeping advice and progress bars of libraries off the console.

Called by commands before the first heavy import, as some libraries read these settings only then.
"""

from __future__ import annotations

import logging
import os


def quiet_libraries() -> None:
    """Silence messages meant for users of the libraries; errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from diffusers.utils.logging import disable_progress_bar

    disable_progress_bar()
