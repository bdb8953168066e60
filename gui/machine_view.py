"""What this machine trains on, in a line: card and memory, free disk.

Inputs: the hardware as the trainer detects it, the runs folder. Output: escaped markup.
"""

from __future__ import annotations

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.common.wording import bytes_text
from lora_trainer.hardware.machine import Hardware, detect
from lora_trainer.reporting.charts import Html, tag

from .workplace import Workplace


def machine_line(work: Workplace, hardware: Hardware | None = None) -> Html:
    """Return the strip at the top of the first page."""
    found = hardware or detect()
    try:
        disk = f"{bytes_text(found.disk_free_bytes(work.runs))} of disk free"
    except (OSError, LoraTrainError):  # the folder was taken away while the page is open
        disk = "the runs folder cannot be read"
    return tag(
        "p",
        tag("b", _device(found)),
        f" \u00b7 {disk} \u00b7 ",
        tag("a", "more about this machine", href="/doctor"),
        class_="machine",
    )


def _device(found: Hardware) -> str:
    if not found.gpus:
        return (
            f"No GPU ({found.gpu_reason}): {found.cpu_name} with {found.cpu_threads} threads, "
            f"{bytes_text(found.ram_total_bytes)} of memory"
        )
    cards = (
        f"{gpu.name}, {bytes_text(gpu.free_bytes)} of {bytes_text(gpu.total_bytes)} free"
        for gpu in found.gpus
    )
    return "; ".join(cards)
