"""Requests to a run that trains: files in its folder control/, each named by what is asked.

Inputs: what somebody asks of a run, from the interface or as a file made by hand. Outputs: the requests that
wait. `stop`, `stop_now` and `save` are empty files. `sample` may hold a prompt as UTF-8 text; an empty one,
the only kind of version 0.2, asks for images of the run's own prompts.
"""

from __future__ import annotations

import os
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import disk_error, retry_while_open, write_atomic
from lora_trainer.common.wording import without_secrets

Request = Literal["stop", "stop_now", "save", "sample"]

CONTROL_FOLDER = "control"
MAX_PROMPT_CHARACTERS = 2_000
_BYTES_PER_CHARACTER = 4  # at most, in UTF-8


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Asks for sample images of `prompt`, or of the run's own prompts where it is empty."""

    prompt: str = ""

    @classmethod
    def of(cls, text: str) -> SampleRequest:
        """Return the request for a text that somebody wrote, as one line; raises RequestError.

        Prompts appear in reports and image files, so secrets are removed.
        """
        prompt = " ".join(text.split())
        if len(prompt) > MAX_PROMPT_CHARACTERS:
            raise RequestError(
                f"the prompt has {len(prompt):,} characters, at most {MAX_PROMPT_CHARACTERS:,} are allowed",
                fix="shorten it",
            )
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in prompt):
            raise RequestError(
                "the prompt holds a control character or half a character", fix="type it anew"
            )
        return cls(prompt=without_secrets(prompt))


@dataclass(frozen=True)
class Control:
    """Requests to a running trainer: one file each in the run's control folder."""

    run_folder: Path

    def pending(self) -> set[str]:
        """Return the requests that wait; files of other names are not requests."""
        folder = self.run_folder / CONTROL_FOLDER
        try:
            names = {entry.name for entry in os.scandir(folder)}
        except OSError:  # no folder, no requests
            return set()
        return names & set(get_args(Request))

    def done(self, name: str) -> None:
        """Remove a request that was obeyed."""
        file = self.run_folder / CONTROL_FOLDER / name
        retry_while_open(lambda: file.unlink(missing_ok=True))

    def forget_before(self, time_s: float) -> None:
        """Remove requests from before `time_s`: they were meant for a process that was killed."""
        for name in self.pending():
            file = self.run_folder / CONTROL_FOLDER / name
            with suppress(OSError):
                if file.stat().st_mtime < time_s:
                    file.unlink()

    def asked_at_s(self, name: Request) -> float | None:
        """Return when a request that waits was made, None if none does."""
        try:
            return (self.run_folder / CONTROL_FOLDER / name).stat().st_mtime
        except OSError:
            return None

    def request(self, name: Request) -> None:
        """Ask the run that trains in this folder for something; raises MachineError."""
        self._write(name, b"")

    def request_samples(self, request: SampleRequest) -> None:
        """Ask the run that trains in this folder for sample images; raises MachineError."""
        self._write("sample", request.prompt.encode())

    def take_samples(self) -> SampleRequest | None:
        """Return the request for sample images that waits and remove it, None if none does.

        Raises RequestError for a file that holds no prompt; it is removed too.
        """
        if "sample" not in self.pending():
            return None
        file = self.run_folder / CONTROL_FOLDER / "sample"
        try:
            with file.open("rb") as opened:
                # A byte more than is allowed, which `SampleRequest.of` then refuses.
                data = opened.read(MAX_PROMPT_CHARACTERS * _BYTES_PER_CHARACTER + 1)
        except OSError as error:
            raise RequestError(
                f"the request for sample images cannot be read: {error.strerror or error}",
                fix="ask again",
            ) from error
        finally:
            self.done("sample")
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise RequestError(
                "the request for sample images is no UTF-8 text, or too long",
                fix=f"write a prompt of at most {MAX_PROMPT_CHARACTERS:,} characters into it",
            ) from None
        return SampleRequest.of(text)

    def _write(self, name: Request, data: bytes) -> None:
        folder = self.run_folder / CONTROL_FOLDER
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(folder, error) from error
        # Renamed into place: the trainer must not read a prompt that is half there.
        write_atomic(folder / name, data, durable=False)
