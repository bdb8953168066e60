"""The calls of torch that differ by device; `devices.py` has the capabilities of each kind.

Inputs are a `torch.device` and sizes in bytes. torch.cuda serves NVIDIA and AMD, torch.xpu has the same API,
torch.mps a smaller one.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_trainer.common.errors import first_line
from lora_trainer.hardware.devices import KINDS, SEGMENTS, DeviceKind, KindName
from lora_trainer.hardware.torch_builds import other_build

# cudaHostRegisterPortable: pinned for every device of the process.
_PORTABLE = 1


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the capabilities of a torch device."""
    name = torch.device(device).type
    if name == "cuda" and torch.version.hip:
        name = "rocm"
    if name == "meta":  # a traced network has no streams, pinned memory or copies
        name = "cpu"
    return KINDS[name]  # type: ignore[index]  # others cannot be chosen


def may_copy_ahead(device: torch.device) -> bool:
    """Return whether the host may go on during a copy to or from the device (`non_blocking`)."""
    return kind_of(device).streams


def side_stream(device: torch.device) -> Any:
    """Return a new stream beside the computing stream, None for a device with a single queue."""
    return torch.get_device_module(device).Stream(device) if kind_of(device).streams else None


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device with streams."""
    return torch.get_device_module(device).current_stream(device)


def mark(device: torch.device) -> Any:
    """Record and return an event behind all queued work, None for a device without streams."""
    return current_stream(device).record_event() if kind_of(device).streams else None


def started_device() -> torch.device | None:
    """Return the GPU whose context this process has opened, else None; opens no context."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    began = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    return device if began() else None


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return a GPU's (free, total) bytes by its driver; raises RuntimeError."""
    api = torch.get_device_module(device)
    if kind_of(device).name == "mps":
        total = int(api.recommended_max_memory())
        return max(0, total - int(api.driver_allocated_memory())), total
    free, total = api.mem_get_info(device)
    return int(free), int(total)


def tensor_bytes(device: torch.device) -> tuple[int, int, int]:
    """Return the bytes of tensors now and at most, and most of the allocator's; MPS has current values only."""
    api = torch.get_device_module(device)
    if kind_of(device).name == "mps":
        now = int(api.current_allocated_memory())
        return now, now, int(api.driver_allocated_memory())
    reserved = int(api.max_memory_reserved(device))
    return int(api.memory_allocated(device)), int(api.max_memory_allocated(device)), reserved


def total_bytes(device: torch.device) -> int:
    """Return the memory of a GPU; for Apple's GPUs the memory Metal recommends for one process."""
    api = torch.get_device_module(device)
    if kind_of(device).name == "mps":
        return int(api.recommended_max_memory())
    return int(api.get_device_properties(device).total_memory)


def set_memory_share(device: torch.device, share: float) -> None:
    """Limit torch's allocator on a GPU to a share of its memory."""
    where = () if kind_of(device).name == "mps" else (device,)
    torch.get_device_module(device).set_per_process_memory_fraction(share, *where)


def first_allocation(device: torch.device) -> str:
    """Allocate on a GPU for the first time; return why its allocator's segments do not grow, "" where all is well.

    torch asks the driver about the links between GPUs before it lets segments grow. Tegra, slices of MIG and some
    containers do not answer, and every allocation would then fail.
    """
    if kind_of(device).name != "cuda":
        return ""
    try:
        torch.empty(1, device=device)
        return ""
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = first_line(error)
    torch.cuda.memory._set_allocator_settings(f"{SEGMENTS}:False")
    torch.empty(1, device=device)
    return reason


def name_of(device: torch.device) -> str:
    """Return a GPU's name."""
    if kind_of(device).name == "mps":
        return str(torch.backends.mps.get_name())
    return str(torch.get_device_module(device).get_device_name(device))


def gpu_identity(device: torch.device) -> str:
    """Return the identity of a GPU of NVIDIA or AMD, which no other has on any machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def register_host(address: int, size_bytes: int) -> int:
    """Pin existing host memory for copies to all GPUs; return CUDA's error code, 0 for success."""
    return int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))


def unregister_host(address: int) -> None:
    """Undo `register_host`; no copy may be in progress."""
    torch.cuda.cudart().cudaHostUnregister(address)


def found_by_torch(*, torch: Any = torch) -> list[dict[str, Any]]:
    """Return the GPUs that torch lists, as fields of `hardware.Gpu`, for builds without NVML.

    `torch` is the module, replaced in tests.
    """
    rows: list[tuple[int, str, int, int, KindName, bool]] = []
    is_rocm = bool(torch.cuda.is_available() and torch.version.hip)
    if torch.backends.mps.is_available():
        total = int(torch.mps.recommended_max_memory())
        free = total - int(torch.mps.driver_allocated_memory())
        bf16 = bool(
            torch.backends.mps.is_macos_or_newer(14, 0)
        )  # Metal has bfloat from macOS 14 on
        rows = [(0, torch.backends.mps.get_name(), total, free, "mps", bf16)]
    elif is_rocm or torch.xpu.is_available():
        api = torch.cuda if is_rocm else torch.xpu
        for index in range(api.device_count()):
            free, total = api.mem_get_info(index)
            facts = api.get_device_properties(index)
            if is_rocm:
                arch = str(facts.gcnArchName).partition(":")[0]
                # torch reports bf16 for any HIP GPU; GPUs other than these compute it in fp32.
                bf16 = arch.startswith(("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"))
                rows.append((index, f"{facts.name} ({arch})", total, free, "rocm", bf16))
            else:
                bf16 = bool(api.is_bf16_supported())
                rows.append((index, str(facts.name), total, free, "xpu", bf16))
    fields = ("index", "name", "total_bytes", "free_bytes", "kind", "bf16")
    return [dict(zip(fields, row, strict=True)) for row in rows]


def require_kernels(device: torch.device, *, driver: str = "", torch: Any = torch) -> str:
    """Return why torch cannot compute on a GPU that it lists, "" if it can; opens the GPU's context.

    `driver` is its version, which decides what build is advised instead.

    By CUDA's rules machine code (sm_) runs on the same major version from its minor version on, and with suffix
    "a" on its exact version only; PTX (compute_) is compiled for all later versions.
    """
    if kind_of(device).name != "cuda":
        return ""
    major, minor = capability = torch.cuda.get_device_capability(device)
    archs = [arch for arch in torch.cuda.get_arch_list() if arch.startswith(("sm_", "compute_"))]
    for arch in archs:
        form, _, digits = arch.partition("_")
        number = "".join(letter for letter in digits if letter.isdigit())
        built = (int(number[:-1]), int(number[-1]))
        if form == "compute":
            runs = capability >= built
        elif digits.endswith("a"):
            runs = capability == built
        else:
            runs = major == built[0] and minor >= built[1]
        if runs:
            return ""
    if not archs:
        return ""
    name = torch.cuda.get_device_name(device)
    return (
        f"{name} has compute capability {major}.{minor}, and torch {torch.__version__} has kernels for "
        f"{', '.join(archs)} only: {other_build([capability], driver)}"
    )
