"""Which room calls which while an analysis runs: a script that prints every call from a room to a later one.

Data flows down the list of rooms once. A room may call back what it was handed: a function among its arguments, or a
method of one of them (``Result.save`` calls the figure of the result it belongs to). A registry, a patched global or a
late import is not an argument, and shows up here.

Without pytest's type checker around every function, hence a process of its own: ``python tests/calls.py FOLDER``.
"""

import functools
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import tl_headmaps

PACKAGE = Path(tl_headmaps.__file__).parent


class Tracer:
    """Counts calls between rooms, and lists those that go to a later one without having been handed in."""

    def __init__(self, order: list[str]) -> None:
        self.level = {room: level for level, room in enumerate(order)}
        self.rooms: dict[str, str | None] = {}
        self.upward: dict[str, None] = {}
        self.n_calls = 0
        self.n_handed = 0

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event != "call" or (callee := self.room(frame)) is None:
            return
        caller = frame.f_back
        while caller is not None and self.room(caller) is None:
            caller = caller.f_back
        if caller is None:
            return
        self.n_calls += 1
        if self.level[callee] > self.level[str(self.room(caller))]:
            if was_handed(frame, caller):
                self.n_handed += 1
            else:
                self.upward[f"{place(caller)} calls {place(frame)}"] = None

    def room(self, frame: types.FrameType) -> str | None:
        """The room of a frame; None for code of others, and for the public names, which belong to no room."""
        # Asked for every call of any code, hence remembered by file.
        file = frame.f_code.co_filename
        if file not in self.rooms:
            inside = Path(file).parts[len(PACKAGE.parts) :] if Path(file).is_relative_to(PACKAGE) else ("",)
            name = inside[0].removesuffix(".py")
            self.rooms[file] = name if name in self.level else None
        return self.rooms[file]


def place(frame: types.FrameType) -> str:
    path = Path(frame.f_code.co_filename).relative_to(PACKAGE)
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.10 has the shorter one
    return f"{path.as_posix()}:{name}"


def was_handed(callee: types.FrameType, caller: types.FrameType) -> bool:
    """Whether the callee is among the caller's arguments, what it closes over, or one of their attributes."""
    for value in given(caller):
        if callee.f_code in codes(value) or any(callee.f_code in codes(part) for part in attributes(value)):
            return True
        if is_method_of(callee, value) or any(is_method_of(callee, part) for part in attributes(value)):
            return True
    return False


def given(frame: types.FrameType) -> Iterator[Any]:
    code = frame.f_code
    n_arguments = code.co_argcount + code.co_kwonlyargcount
    n_arguments += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    for name in (*code.co_varnames[:n_arguments], *code.co_freevars):
        if name in frame.f_locals:
            yield frame.f_locals[name]


def attributes(value: Any) -> Iterator[Any]:
    return iter(getattr(value, "__dict__", {}).values()) if not isinstance(value, type | types.ModuleType) else iter(())


def codes(value: Any) -> set[types.CodeType]:
    if isinstance(value, functools.partial):
        return codes(value.func)
    if isinstance(value, dict | list | tuple):
        contained = value.values() if isinstance(value, dict) else value
        return set(chain.from_iterable(codes(part) for part in contained if callable(part)))
    owner = getattr(value, "__func__", value)
    return {code for name in ("__code__", "gi_code") if isinstance(code := getattr(owner, name, None), types.CodeType)}


def is_method_of(callee: types.FrameType, value: Any) -> bool:
    names = callee.f_code.co_varnames[: callee.f_code.co_argcount]
    return bool(names) and names[0] == "self" and callee.f_locals.get("self") is value


def traced(call: Callable[[], Any], order: list[str]) -> dict[str, Any]:
    tracer = Tracer(order)
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {"calls": tracer.n_calls, "handed": tracer.n_handed, "upward": list(tracer.upward)}


def main(folder: Path, order: list[str]) -> None:
    """Three analyses of small models, from the call to the page."""
    from planted import random_model, word

    from tl_headmaps import Relation, TaskItem, Tasks, component_map, relation_scores, task_maps

    model, text = random_model("llama"), " word3 word4 word5 word6 word7 word8" * 4
    relation = Relation.from_pairs("next", [(number, number + 1) for number in range(3, 30)])
    items = [
        TaskItem(f" {word(9 + number)} {word(3 + label)}", word(5 + label), function, content=str(number))
        for number in range(10)
        for label, function in enumerate(("retrieval", "inference"))
    ]
    analyses: dict[str, Callable[[], Any]] = {
        "relation_scores": lambda: relation_scores(
            model, relation, run_dir=folder / "run", progress=False, preset="folded"
        ),
        "component_map": lambda: component_map(model, "contribution", [text], progress=False),
        "component_map of the weights": lambda: component_map(model, "stable_rank", progress=False),
        "task_maps": lambda: task_maps(
            model, Tasks(tuple(items)), n_folds=3, n_null=1, cache_dir=folder, progress=False
        ),
    }
    answer = {name: traced(lambda call=call: call().save(folder / "x.html"), order) for name, call in analyses.items()}
    print(json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
