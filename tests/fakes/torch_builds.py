"""Stand-ins for the `torch` module as it is on other machines: what its devices answer, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class FakeGpu:
    """A GPU as torch describes it; `arch` is AMD's name of it, `capability` NVIDIA's number."""

    name: str
    total_bytes: int = 16 * GIB
    free_bytes: int = 15 * GIB
    arch: str = ""
    capability: tuple[int, int] = (0, 0)


def fake_torch(
    *,
    cuda: tuple[FakeGpu, ...] = (),
    xpu: tuple[FakeGpu, ...] = (),
    mps_bytes: int = 0,
    hip: str | None = None,
    archs: tuple[str, ...] = (),
    version: str = "2.13.0",
) -> Any:
    """Return a module with the parts that `lora_trainer.hardware.devices` asks."""
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(hip=hip),
        backends=SimpleNamespace(
            mps=SimpleNamespace(
                is_available=lambda: mps_bytes > 0,
                get_name=lambda: "Apple M3 Max",
                is_macos_or_newer=lambda *asked: asked <= (15, 1),
            )
        ),
        mps=SimpleNamespace(
            recommended_max_memory=lambda: mps_bytes, driver_allocated_memory=lambda: GIB
        ),
        cuda=_api(cuda, archs),
        xpu=SimpleNamespace(**vars(_api(xpu, ())), is_bf16_supported=lambda: True),
    )


def _api(gpus: tuple[FakeGpu, ...], archs: tuple[str, ...]) -> SimpleNamespace:
    def at(index: Any) -> FakeGpu:
        return gpus[getattr(index, "index", index) or 0]

    return SimpleNamespace(
        is_available=lambda: bool(gpus),
        device_count=lambda: len(gpus),
        mem_get_info=lambda index: (at(index).free_bytes, at(index).total_bytes),
        get_device_properties=lambda index: SimpleNamespace(
            name=at(index).name, gcnArchName=at(index).arch
        ),
        get_device_name=lambda index: at(index).name,
        get_device_capability=lambda index: at(index).capability,
        get_arch_list=lambda: list(archs),
    )
