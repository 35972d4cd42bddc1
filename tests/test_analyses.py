"""A new analysis is complete: its call and its results are public, and it has a command."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
from test_cli_signatures import CALLS

import tl_headmaps
from tl_headmaps.results import Result

PACKAGE = Path(tl_headmaps.__file__).parent

NOT_A_QUESTION = {"study", "sweep"}
"""The study is how all of them begin; the sweep works on many layers."""

WITHOUT_A_COMMAND = {"verify_tasks"}
"""Called by an option of another command: tasks --verify."""

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
    listed = {*NOT_A_QUESTION, *WITHOUT_A_COMMAND}
    assert listed <= set(QUESTIONS), f"no such question: {sorted(listed - set(QUESTIONS))}"


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


@pytest.mark.parametrize("question", [name for name in QUESTIONS if name not in NOT_A_QUESTION | WITHOUT_A_COMMAND])
def test_a_question_has_a_command(question: str) -> None:
    assert question in CALLS.values(), (
        f"add to tl_headmaps/cli/app.py: app.command()({question})\n"
        f'and to CALLS in tests/test_cli_signatures.py: "{question.replace("_", "-")}": "{question}",'
    )
