"""A new analysis is complete: its call and its results are public. That it has a command: test_cli_signatures.py."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

import tl_headmaps
from tl_headmaps.results import Result

PACKAGE = Path(tl_headmaps.__file__).parent

NOT_A_QUESTION = {"study", "sweep", "worked_example"}
"""The study is how all of them begin; the sweep works on many layers; a worked example is a part of value mixing."""

QUESTIONS = sorted({path.stem for path in (PACKAGE / "analyses").iterdir() if not path.name.startswith("__")})


def modules(question: str) -> list[str]:
    """The modules of a question, below the package: one file, or those of its folder."""
    folder = PACKAGE / "analyses" / question
    if not folder.is_dir():
        return [f"analyses.{question}"]
    return [f"analyses.{question}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]


def public(name: str, module: str) -> str:
    return f"add to tl_headmaps/__init__.pyi: from .{module} import {name} as {name}"


def test_there_are_questions() -> None:
    assert {"relation_scores", "token_grid"} <= set(QUESTIONS)
    assert set(QUESTIONS) >= NOT_A_QUESTION, f"no such question: {sorted(NOT_A_QUESTION - set(QUESTIONS))}"


@pytest.mark.parametrize("question", [name for name in QUESTIONS if name not in NOT_A_QUESTION])
def test_the_call_of_a_question_has_its_name_and_is_public(question: str) -> None:
    defining = [name for name in modules(question) if question in vars(import_module(f"tl_headmaps.{name}"))]
    assert defining, f"analyses/{question} defines no {question}(), the call it is named after"
    assert question in tl_headmaps.__all__, public(question, defining[0])


@pytest.mark.parametrize("question", QUESTIONS)
def test_results_are_public(question: str) -> None:
    missing = []
    for module in modules(question):
        for name, value in vars(import_module(f"tl_headmaps.{module}")).items():
            own = inspect.isclass(value) and value.__module__ == f"tl_headmaps.{module}"
            if own and issubclass(value, Result) and "kind" in vars(value) and name not in tl_headmaps.__all__:
                missing.append(public(name, module))
    assert not missing, "\n".join(missing)
