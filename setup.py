"""Lists the packages for setuptools: every folder with an `__init__.py`, under the name it has when installed."""

from setuptools import find_packages, setup

# Where it lies in the checkout -> its name when installed; package-dir in pyproject.toml says the same.
TOPS = {
    "lora_trainer": "lora_trainer",
    "gui": "lora_trainer.gui",
    "presets": "lora_trainer.presets",
}


def packages() -> list[str]:
    """Return the names of all packages; the example's folder is one for its images."""
    found = ["lora_trainer.example"]
    for folder, name in TOPS.items():
        found += [name, *(f"{name}.{inner}" for inner in find_packages(folder))]
    return found


setup(packages=packages())
