"""What every test runs under: no network, no file outside temporary folders, no user settings.

Set before any test module is imported, because libraries read these variables once; the processes
that tests start inherit them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

from lora_trainer.common.files import user_cache_folder
from lora_trainer.common.processes import made_to_stay
from lora_trainer.hardware.kept_memory import KEPT_MEMORY_FILE, take_back
from tests.forks import live_in

# A loaded machine is not a failure; CI tries the same examples every time, people get new ones.
settings.register_profile(
    "project",
    max_examples=50,
    deadline=None,
    database=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("project")

# Threads of torch wait for one another by turning. Beside other programs, such as another test process, a module takes
# up to five times as many seconds of a core, and the networks here are too small for two threads to gain. Not among
# the variables below: tests/model/conftest.py has imported torch by then where that folder is named.
os.environ["OMP_NUM_THREADS"] = "1"

# glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 512 << 20


def keep_freed_memory() -> None:
    """Let this process, and none that it starts, use freed memory again instead of giving it back.

    Large tensors come and go in thousands; fetching the pages of each from the system took a tenth of the suite's time.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def pytest_configure(config: pytest.Config) -> None:
    """Give this test run a home folder of its own and take the network away."""
    keep_freed_memory()
    home = tempfile.TemporaryDirectory(prefix="lora-train-tests-", ignore_cleanup_errors=True)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(home.cleanup)
    config.add_cleanup(patch.undo)
    for name in [name for name in os.environ if name.startswith(("HF_", "LORA_TRAIN", "WANDB_"))]:
        patch.delenv(name)
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        patch.setenv(name, "")  # given back at the end
    live_in(Path(home.name))
    patch.setenv("HF_HUB_OFFLINE", "1")
    # Not in the home of this run: what it reads out of our sources takes each test process 2 s and is the same in all.
    set_hypothesis_home_dir(config.rootpath / ".pytest_cache" / "hypothesis")
    patch.setenv("TOKENIZERS_PARALLELISM", "false")  # else a warning in every forked child


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for no garbage while modules are imported, nor later among their objects, which are millions."""
    with made_to_stay():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules of `long.txt`, in its order, then those of `slow.txt`.

    Then no long one is left at the end, beside idle processes. The longest come first. Modules that wait for a browser
    stand apart from one another, among those that compute: three that wait at once leave the cores idle.
    """
    words = [
        word
        for name in ("long.txt", "slow.txt")
        for word in Path(__file__).with_name(name).read_text(encoding="utf-8").split()
    ]
    modules = list(dict.fromkeys(word.partition("::")[0] for word in words))
    place = {module: index for index, module in enumerate(modules)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(modules)))


@pytest.fixture(scope="module", autouse=True)
def no_base_stays_loaded() -> Iterator[None]:
    """End the process that draws for a page after its module, and forget it: it would count in what others detect.

    Forgotten is also one that has ended: tests that play another machine cannot be asked whether it runs.
    """
    yield
    take_back(is_told=False)
    (user_cache_folder() / KEPT_MEMORY_FILE).unlink(missing_ok=True)


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_module_only() -> None:
    """Take what lives already out of all later searches for garbage: objects of libraries and of test modules.

    They are millions, each search would take half a second, and encoding, out of memory and many tests search.
    """
    gc.collect()
    gc.freeze()
