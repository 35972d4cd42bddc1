"""What a command that is made from a call can still get wrong: a missing line, a type not seen, help without words."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from commands import COMMANDS

import tl_headmaps
from tl_headmaps.cli.build import HEADS, PYTHON_ONLY, is_set
from tl_headmaps.cli.commands import COMMANDS as CALLS

ROOT = Path(__file__).parent.parent
WITHOUT_COMMAND = {"ablated", "load_default_model", "load_model", "load_relations", "load_tasks", "predicate"}
"""Public functions that prepare or support an analysis."""

BY_HAND = {"cite", "default_model_folder", "verify_tasks"}
"""Those whose command is written by hand, or that are an option of another."""


def options(command: str) -> dict[str, Any]:
    """Options and arguments by the name of their parameter."""
    return {entry.name: entry for entry in COMMANDS[command].params if not getattr(entry, "hidden", False)}


def test_every_call_has_a_command() -> None:
    public = {name for name in tl_headmaps.__all__ if inspect.isfunction(getattr(tl_headmaps, name))}
    called = {command.call for command in CALLS.values()}
    missing = public - called - WITHOUT_COMMAND - BY_HAND
    assert not missing, f'add to COMMANDS in cli/commands.py: "...": Command("{min(missing)}"),'
    assert called | WITHOUT_COMMAND | BY_HAND <= public


def test_help_imports_nothing_heavy() -> None:
    """The help of every command, in a process of its own."""
    heavy = {"torch", "numpy", "transformers", "transformer_lens", "scipy", "pandas", "datasets", "circuitsvis"}
    script = (
        "import sys\n"
        "from tl_headmaps.cli.app import app\n"
        f"for arguments in {[[], *([name] for name in COMMANDS)]!r}:\n"
        "    try:\n"
        "        app([*arguments, '--help'])\n"
        "    except SystemExit as leaving:\n"
        "        assert leaving.code == 0, arguments\n"
        f"print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout.count("Usage: ") == 1 + len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option_in_plain_words(command: str, run: Any) -> None:
    text = run(command, "--help").out
    usage, _, rest = text.partition("\n\n")
    assert not re.search(r"\[\[|\.\.\.\S*\.\.\.", usage), f"the metavar has brackets or dots of its own: {usage}"
    assert "`" not in text and ":func:" not in text and '"""' not in text
    for name, entry in options(command).items():
        if entry.param_type_name == "option" and name != "help":
            assert entry.help and " ".join(entry.help.split()) in " ".join(rest.split()), f"{command} --{name}"


@pytest.mark.parametrize("command", CALLS)
def test_options_left_out_are_left_to_the_call(command: str) -> None:
    context = COMMANDS[command].make_context(command, [], resilient_parsing=True)
    assert {name for name, value in context.params.items() if is_set(value)} == set()


@pytest.mark.parametrize("command", CALLS)
def test_types_are_those_of_the_call(command: str) -> None:
    shown = options(command)
    for name, parameter in inspect.signature(getattr(tl_headmaps, CALLS[command].call)).parameters.items():
        if name in PYTHON_ONLY:
            continue
        entry, default = shown[name], parameter.default
        if isinstance(default, bool):
            assert entry.is_flag
        elif isinstance(default, int | float):
            assert entry.type in (click.INT, click.FLOAT) and str(default) in entry.help
        if name not in HEADS:
            assert entry.required is (default is inspect.Parameter.empty), f"{command} --{name}"
        if not isinstance(entry.type, click.Choice) and re.search(r"Iterable|Sequence|Mapping", str(parameter)):
            listed = name not in ("prompts", "templates")  # those are files
            assert not listed or entry.nargs == -1 or entry.multiple, f"{command} --{name}: of two, one would be lost"
