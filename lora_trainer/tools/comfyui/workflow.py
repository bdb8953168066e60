"""A workflow of ComfyUI with a LoRA put in, and with another prompt.

Inputs: a workflow in the form of "Export (API)" and what each of its classes of nodes takes and gives, as ComfyUI says.
Nothing here knows a model: the LoRA goes behind the node that loads the model, and the prompt into the node that the
positive side of the sampler leads back to. The workflow itself is not changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from PIL import Image

from lora_trainer.common.errors import InputError, RequestError, first_line

from .server import Graph

Describe = Callable[[str], Mapping[str, Any]]
"""What a class of nodes takes and gives, by its name."""

MODEL, CLIP, CONDITIONING, STRING = "MODEL", "CLIP", "CONDITIONING", "STRING"
LOADER, MODEL_LOADER = "LoraLoader", "LoraLoaderModelOnly"
_LOADERS = (LOADER, MODEL_LOADER)


def read_workflow(file: Path) -> Graph:
    """Return the workflow of a file: "Export (API)" of ComfyUI, or a picture that ComfyUI has saved.

    Raises InputError for a file that holds none.
    """
    try:
        if file.suffix.lower() == ".json":
            text = file.read_text(encoding="utf-8")
        else:
            with Image.open(file) as opened:
                text = str(opened.info.get("prompt", ""))
        graph = json.loads(text) if text else None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{file} cannot be read as a workflow: {first_line(error)}",
            fix='use the file of "Export (API)" in ComfyUI, or a picture that it saved',
        ) from None
    if isinstance(graph, dict) and isinstance(graph.get("nodes"), list):
        raise InputError(
            f"{file} is a workflow for ComfyUI's editor",
            fix='use "Export (API)" there instead of "Save"',
        )
    if graph is None or not is_graph(graph):
        raise InputError(
            f"{file} holds no workflow",
            fix='use the file of "Export (API)" in ComfyUI, or a picture that it saved',
        )
    return graph


def is_graph(value: Any) -> TypeGuard[Graph]:
    """Return whether a value is a workflow: nodes by their number, each with a class and inputs."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(
            isinstance(node, dict)
            and isinstance(node.get("class_type"), str)
            and isinstance(node.get("inputs"), dict)
            for node in value.values()
        )
    )


class Workflow:
    """A workflow that LoRAs can be put into."""

    def __init__(self, graph: Graph, describe: Describe) -> None:
        """Take a graph, and where to ask what its classes of nodes take and give."""
        self._graph = graph
        classes = {node["class_type"] for node in graph.values()}
        self._classes = {name: describe(name) for name in sorted(classes)}

    def draws(self) -> bool:
        """Return whether some node loads a model."""
        return bool(self._sources(MODEL))

    def prompts(self) -> list[str]:
        """Return the texts that the positive side reads, in the order of their nodes."""
        places = self._prompt_places(self._graph)
        return list(dict.fromkeys(self._graph[node]["inputs"][name] for node, name in places))

    def with_lora(
        self, name: str, *, strength: float, on_text: bool, prompt: str | None, loader: str | None
    ) -> Graph:
        """Return a workflow that draws with a LoRA.

        `name` is ComfyUI's for the file; `on_text`: the file changes text encoders too; `loader`: the node that loads
        the model, needed where there are several. Where a node loads this LoRA already, it gets the strength.
        Raises InputError where the workflow has no place for the LoRA, RequestError where `loader` or `prompt` is
        needed and cannot be found.
        """
        graph: dict[str, Any] = copy.deepcopy(dict(self._graph))
        if prompt is not None:
            places = list(self._prompt_places(graph))
            if not places:
                raise RequestError(
                    "no prompt is found in the workflow",
                    fix="leave the prompt out: its own is drawn",
                )
            for node, field in places:
                graph[node]["inputs"][field] = prompt
        there = [
            node
            for node in graph.values()
            if node["class_type"] in _LOADERS and node["inputs"].get("lora_name") == name
        ]
        for node in there:
            _set_strength(node["inputs"], strength)
        if not there:
            self._insert(graph, name, strength=strength, on_text=on_text, loader=loader)
        return graph

    def _insert(
        self,
        graph: dict[str, Any],
        name: str,
        *,
        strength: float,
        on_text: bool,
        loader: str | None,
    ) -> None:
        """Put a node that loads the LoRA between the node that loads the model and all that use it."""
        model = self._chosen(loader)
        clips = self._sources(CLIP)
        clip = clips[0] if on_text and len(clips) == 1 else None
        new = _unused(graph)
        outputs = {tuple(model): [new, 0]}
        inputs: dict[str, Any] = {"lora_name": name, "model": model}
        if clip is not None:
            inputs["clip"] = clip
            outputs[tuple(clip)] = [new, 1]
        for node in graph.values():
            for key, value in node["inputs"].items():
                if isinstance(value, list) and tuple(value) in outputs:
                    node["inputs"][key] = list(outputs[tuple(value)])
        kind = MODEL_LOADER if clip is None else LOADER
        _set_strength(inputs, strength, with_clip=clip is not None)
        graph[new] = {"class_type": kind, "inputs": inputs}

    def _chosen(self, loader: str | None) -> list[Any]:
        """Return the output that gives the model, as [node, number of its output]."""
        found = self._sources(MODEL)
        shown = ", ".join(f"{node} ({self._graph[node]['class_type']})" for node, _ in found)
        if not found:
            raise InputError(
                "no node of the workflow loads a model", fix="use a workflow that draws pictures"
            )
        if loader is None and len(found) > 1:
            raise RequestError(
                f"the workflow loads {len(found)} models: {shown}",
                fix=f"name the node of the one that the LoRA is for, such as --loader={found[0][0]}",
            )
        for source in found:
            if loader in (None, source[0]):
                return source
        raise RequestError(f"node {loader} does not load a model", fix=f"name one of {shown}")

    def _sources(self, kind: str) -> list[list[Any]]:
        """Return the outputs of a kind whose node takes nothing of that kind: where it comes from."""
        found = []
        for number, node in self._graph.items():
            facts = self._classes[node["class_type"]]
            if kind in self._types(facts).values():
                continue
            given = facts.get("output")
            found += [[number, at] for at, each in enumerate(given or ()) if each == kind]
        return found

    def _prompt_places(self, graph: Graph) -> Iterator[tuple[str, str]]:
        """Yield the node and input of each text on the positive side, once each."""
        starts = self._linked(graph, "positive") or self._linked(graph, "conditioning")
        seen: set[str] = set()
        found: set[tuple[str, str]] = set()
        while starts:
            number = starts.pop(0)
            if number in seen or number not in graph:
                continue
            seen.add(number)
            inputs = graph[number]["inputs"]
            types = self._types(self._classes[graph[number]["class_type"]])
            before = [
                name for name, kind in types.items() if kind == CONDITIONING and name in inputs
            ]
            # A node that passes on both sides, as for a ControlNet, is followed on one.
            before = [name for name in before if name != "negative"] if len(before) > 1 else before
            if before:
                starts += [inputs[name][0] for name in before if isinstance(inputs[name], list)]
                continue
            for name, kind in types.items():
                if kind == STRING and name in inputs:
                    found |= self._text(graph, number, name)
        yield from sorted(found)

    def _text(self, graph: Graph, number: str, name: str) -> set[tuple[str, str]]:
        """Return where the text of an input is typed: there, or in the node that it comes from."""
        value = graph[number]["inputs"][name]
        if isinstance(value, str):
            return {(number, name)}
        if isinstance(value, list) and value and value[0] in graph:
            inputs = graph[value[0]]["inputs"]
            typed = [key for key, text in inputs.items() if isinstance(text, str)]
            # A node that joins texts has several; which of them is the prompt nobody can say.
            return {(value[0], typed[0])} if len(typed) == 1 else set()
        return set()

    def _linked(self, graph: Graph, name: str) -> list[str]:
        """Return the nodes that give what an input of this name takes."""
        values = [node["inputs"].get(name) for node in graph.values()]
        return [value[0] for value in values if isinstance(value, list) and value]

    @staticmethod
    def _types(facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a class of nodes with their types; a list of choices has its own."""
        given = facts.get("input")
        parts = (
            [part for part in given.values() if isinstance(part, dict)]
            if isinstance(given, dict)
            else []
        )
        return {
            name: told[0]
            for part in parts
            for name, told in part.items()
            if isinstance(told, list) and told and isinstance(told[0], str)
        }


def _set_strength(
    inputs: dict[str, Any], strength: float, *, with_clip: bool | None = None
) -> None:
    inputs["strength_model"] = strength
    if with_clip or (with_clip is None and "strength_clip" in inputs):
        inputs["strength_clip"] = strength


def _unused(graph: Graph) -> str:
    """Return a number that no node has."""
    taken = [int(number) for number in graph if number.isdecimal()]
    return str(max(taken, default=0) + 1)
