"""The calls of torch that differ by device; `devices.py` says what each kind can do.

Inputs are a `torch.device` and sizes in bytes. torch.cuda is for NVIDIA and AMD alike, torch.xpu has its
API, torch.mps a smaller one.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_trainer.devices import KINDS, TURING, DeviceKind, KindName, reinstall

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the description of a device of torch."""
    name = torch.device(device).type
    if name == "cuda" and torch.version.hip:
        name = "rocm"
    if name == "meta":  # a traced network: nothing of it is on a stream, pinned or copied
        name = "cpu"
    return KINDS[name]  # type: ignore[index]  # others cannot be chosen


def module_of(device: torch.device) -> Any:
    """Return torch's module for a type of device: `torch.cuda` for NVIDIA and AMD, `torch.mps`, `torch.xpu`."""
    return torch.get_device_module(device)


def may_copy_ahead(device: torch.device) -> bool:
    """Whether a copy to or from it need not be waited for by the host (`non_blocking`)."""
    return kind_of(device).streams


def side_stream(device: torch.device) -> Any:
    """Return a stream beside the one that computes, None where a device has but one queue."""
    return module_of(device).Stream(device) if kind_of(device).streams else None


def current_stream(device: torch.device) -> Any:
    """Return the stream that computes on a device with streams."""
    return module_of(device).current_stream(device)


def on_stream(stream: Any) -> Any:
    """Return a context in which work is queued on a stream."""
    return module_of(stream.device).stream(stream)


def mark(device: torch.device) -> Any:
    """Return an event behind all work queued so far, None where every copy is waited for."""
    return current_stream(device).record_event() if kind_of(device).streams else None


def started_device() -> torch.device | None:
    """Return the GPU that this process has begun to use, None while there is none; begins nothing."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    began = getattr(module_of(device), "is_initialized", lambda: True)
    return device if began() else None


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return what is free on a GPU and what it has, by its driver; raises RuntimeError."""
    api = module_of(device)
    if kind_of(device).name == "mps":
        total = int(api.recommended_max_memory())
        return max(0, total - int(api.driver_allocated_memory())), total
    free, total = api.mem_get_info(device)
    return int(free), int(total)


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """Return the most that tensors took so far, and that the allocator held for them; MPS says what it is now."""
    api = module_of(device)
    if kind_of(device).name == "mps":
        return int(api.current_allocated_memory()), int(api.driver_allocated_memory())
    return int(api.max_memory_allocated(device)), int(api.max_memory_reserved(device))


def tensor_bytes(device: torch.device) -> int:
    """Return what tensors take of a GPU now."""
    api = module_of(device)
    if kind_of(device).name == "mps":
        return int(api.current_allocated_memory())
    return int(api.memory_allocated(device))


def total_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, of Apple's what Metal lets a process use."""
    api = module_of(device)
    if kind_of(device).name == "mps":
        return int(api.recommended_max_memory())
    return int(api.get_device_properties(device).total_memory)


def bound_allocator(device: torch.device, *, allowed_bytes: int) -> int:
    """Let torch take at most so much of a GPU; return what it may have."""
    api = module_of(device)
    total = total_bytes(device)
    allowed_bytes = min(total, allowed_bytes)
    where = () if kind_of(device).name == "mps" else (device,)
    api.set_per_process_memory_fraction(allowed_bytes / total, *where)
    return allowed_bytes


def name_of(device: torch.device) -> str:
    """Return what a GPU calls itself."""
    if kind_of(device).name == "mps":
        return str(torch.backends.mps.get_name())
    return str(module_of(device).get_device_name(device))


def register_host(address: int, size_bytes: int) -> int:
    """Lock host memory in place for copies to every GPU; return CUDA's error code, 0 for none."""
    return int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))


def unregister_host(address: int) -> None:
    """Undo `register_host`; no copy may be under way."""
    torch.cuda.cudart().cudaHostUnregister(address)


def found_by_torch(*, torch: Any = torch) -> list[dict[str, Any]]:
    """Return the GPUs that torch sees, as the fields of `hardware.Gpu`; for builds that NVML knows nothing of.

    `torch` is the module, for tests.
    """
    if torch.backends.mps.is_available():
        total = int(torch.mps.recommended_max_memory())
        used = int(torch.mps.driver_allocated_memory())
        named = torch.backends.mps.get_name()
        bf16 = torch.backends.mps.is_macos_or_newer(14, 0)  # Metal has bfloat from macOS 14 on
        return [_card(0, named, total, total - used, kind="mps", bf16=bool(bf16))]
    if torch.cuda.is_available() and torch.version.hip:
        found = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            facts = torch.cuda.get_device_properties(index)
            arch = str(getattr(facts, "gcnArchName", "")).partition(":")[0]
            name = f"{facts.name} ({arch})" if arch else facts.name
            # torch says bf16 for all of HIP; before gfx90a, gfx11 and gfx12 it is computed in fp32.
            bf16 = arch.startswith(("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"))
            found.append(_card(index, name, total, free, kind="rocm", bf16=bf16))
        return found
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found = []
        for index in range(torch.xpu.device_count()):
            free, total = torch.xpu.mem_get_info(index)
            name = torch.xpu.get_device_properties(index).name
            bf16 = bool(torch.xpu.is_bf16_supported())
            found.append(_card(index, name, total, free, kind="xpu", bf16=bf16))
        return found
    return []


def _card(
    index: int, name: str, total: int, free: int, *, kind: KindName, bf16: bool
) -> dict[str, Any]:
    return {
        "index": index,
        "name": str(name),
        "total_bytes": int(total),
        "free_bytes": int(free),
        "kind": kind,
        "bf16": bf16,
    }


def require_kernels(device: torch.device, *, torch: Any = torch) -> str:
    """Return why torch has no kernels for a card that it sees, empty where it has; opens its context."""
    if kind_of(device).name != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    archs = [arch for arch in torch.cuda.get_arch_list() if arch.startswith(("sm_", "compute_"))]
    if not archs or _has_kernels((major, minor), archs):
        return ""
    name = torch.cuda.get_device_name(device)
    index = "cu126" if (major, minor) < TURING else "cu128"
    return (
        f"{name} has compute capability {major}.{minor}, and torch {torch.__version__} has kernels for "
        f"{', '.join(archs)} only: {reinstall(index)}"
    )


def _has_kernels(capability: tuple[int, int], archs: list[str]) -> bool:
    """As CUDA matches: machine code within one major version upwards, PTX for all that came later."""
    for arch in archs:
        form, _, digits = arch.partition("_")
        number = "".join(letter for letter in digits if letter.isdigit())
        built = (int(number[:-1]), int(number[-1]))
        exact = digits.endswith("a")
        if form == "compute" and capability >= built:
            return True
        if form == "sm" and (
            capability == built
            if exact
            else capability[0] == built[0] and capability[1] >= built[1]
        ):
            return True
    return False
