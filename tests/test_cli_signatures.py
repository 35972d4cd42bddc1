"""The command line says what the API says: options are parameters, and an option left out is the API's default."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import tl_headmaps
from tl_headmaps.cli.app import app

ROOT = Path(__file__).parent.parent
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]

CALLS = {
    "ablate": "ablate",
    "association": "association_heads",
    "cite": "cite",
    "compare": "compare",
    "compare-attention": "compare_attention",
    "components": "component_map",
    "grid": "token_grid",
    "groups": "attention_groups",
    "head": "describe_head",
    "mixing": "value_mixing",
    "model": "describe_model",
    "name-heads": "name_heads",
    "profile": "grouping_profile",
    "relations": "relation_scores",
    "reproduce": "reproduce",
    "salient": "salient_operations",
    "tasks": "task_maps",
    "trust": "head_trust",
    "validate": "validate",
    "worth": "head_worth",
}
"""The API function that a command calls."""

DONE = sorted(CALLS)

WITHOUT_A_CALL = {"demo", "doctor"}
"""Commands that call several functions, or none."""

COMMAND_LINE_ONLY = {"--model", "--checkpoint", "--device", "--out", "--workers", "--help"}
"""Where the model comes from, where results go, who computes: the same in every command."""

POSITIONAL = {"--heads": "named_heads", "--head": "named_head"}
"""Options whose value may also be given as an argument, and the name of that argument."""

OWN_OPTIONS = {
    "mixing": {"--against", "--control"},  # about ValueMixing.dimensions
    "relations": {"--list", "--category", "--side-by-side"},  # about the bundled relations, and about the figure
    "salient": {"--all"},  # thousands of lines only when asked for
    # about the items, and about verify_tasks, which --verify calls
    "tasks": {"--data", "--functions", "--drop-duplicates", "--sample"}
    | {"--verify", "--n-items", "--n-random", "--max-heads"},
}
"""Further options that are not parameters of the call."""

PYTHON_ONLY = {"model", "executor", "progress"}
"""Parameters that are never options: the command line has its own way for each."""

OWN_PARAMETERS = {
    "ablate": {"data_dir"},
    "association": {"cache"},
    "components": {"column"},
    "groups": {"cache"},
    "mixing": {"cache"},
    "profile": {"column"},
    "reproduce": {"data_dir", "out"},  # the folder is --out
    "tasks": {"tasks", "budget", "cache_dir"},
    "validate": {"data_dir"},
    "cite": {"file"},
    "name-heads": {"describe"},
    "relations": {"data_dir"},  # files are given by their path
    "salient": {"describe"},
    "trust": {"cache_dir"},
}
"""Further parameters that are not options: functions, streams, folders."""


def parameters(command: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(tl_headmaps, CALLS[command])).parameters)


def options(command: str) -> dict[str, Any]:
    """Options and arguments by their name on the command line; an argument as if it were an option."""
    shown = [entry for entry in COMMANDS[command].params if not getattr(entry, "hidden", False)]
    return {entry.opts[0] if entry.param_type_name == "option" else f"--{entry.name}": entry for entry in shown}


def own_options(command: str) -> dict[str, Any]:
    left_out = COMMAND_LINE_ONLY | OWN_OPTIONS.get(command, set()) | {f"--{name}" for name in POSITIONAL.values()}
    return {name: entry for name, entry in options(command).items() if name not in left_out}


def test_every_command_is_listed_here() -> None:
    listed = {*CALLS, *WITHOUT_A_CALL}
    missing = sorted(set(COMMANDS) - listed)
    assert not missing, "add to CALLS: " + ", ".join(f'"{name}": "..."' for name in missing)
    assert listed <= set(COMMANDS), f"no such command: {sorted(listed - set(COMMANDS))}"
    for name, own in OWN_OPTIONS.items():
        assert own <= set(options(name)), f"{name} has no {sorted(own - set(options(name)))}"


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


@pytest.mark.parametrize("option", POSITIONAL)
def test_heads_may_be_arguments_wherever_there_is_no_other(option: str) -> None:
    for name, command in COMMANDS.items():
        arguments = {entry.name: entry for entry in command.params if entry.param_type_name == "argument"}
        if option in options(name) and not set(arguments) - {POSITIONAL[option]}:
            assert POSITIONAL[option] in arguments, f"{name} takes {option} L23H4, but not L23H4 alone"
            assert f"The same as {option}" in arguments[POSITIONAL[option]].help


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_usage_marks_arguments_once(command: str, run: Any) -> None:
    usage = run(command, "--help").out.partition("\n\n")[0]
    assert not re.search(r"\[\[|\.\.\.\S*\.\.\.", usage), f"the metavar has brackets or dots of its own: {usage}"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_options_that_take_a_list_add_up(command: str) -> None:
    for name, entry in options(command).items():
        listed = re.search(r"commas|[A-Z0-9]\[?,[A-Z0-9]|\d,\d", f"{entry.metavar} {getattr(entry, 'help', '')}")
        if listed or (command, name) == ("grid", "--targets"):
            assert entry.multiple or entry.nargs == -1, f"{command} {name}: of two lists, the first would be lost"
            assert entry.metavar, f"{command} {name}: the help would call it <list[str]>"


@pytest.mark.parametrize("command", DONE)
def test_options_are_parameters(command: str) -> None:
    names = {name.removeprefix("--").replace("-", "_") for name in own_options(command)}
    unknown = names - set(parameters(command))
    assert not unknown, f"{command}: {sorted(unknown)} are not parameters of {CALLS[command]}"
    expected = set(parameters(command)) - PYTHON_ONLY - OWN_PARAMETERS.get(command, set())
    assert names == expected, f"{command} has no option for {sorted(expected - names)}"


@pytest.mark.parametrize("command", DONE)
def test_an_option_left_out_is_the_default_of_the_api(command: str) -> None:
    for name, entry in own_options(command).items():
        parameter = parameters(command)[name.removeprefix("--").replace("-", "_")]
        if entry.required:
            assert parameter.default is inspect.Parameter.empty, f"{command} {name} is required, {parameter} is not"
        else:
            # None is not passed on (given()), except for what a command finds by itself (all bundled relations).
            assert entry.default is None or entry.default == parameter.default, f"{command} {name}"


@pytest.mark.parametrize("command", DONE)
def test_defaults_told_in_the_help_are_true(command: str) -> None:
    for name, entry in own_options(command).items():
        told = re.search(r"default: ([\w.-]+?)\.$", getattr(entry, "help", None) or "")
        default = parameters(command)[name.removeprefix("--").replace("-", "_")].default
        if told and default is not None and default is not inspect.Parameter.empty:
            assert told[1] == str(default), f"{command} {name}: the help says {told[1]}, the API {default}"
        if isinstance(default, str | int) and not isinstance(default, bool):
            assert told or str(default) in entry.help, (
                f"{command} {name}: its help does not tell the default, {default!r}"
            )


def test_defaults_of_the_verification_are_those_of_its_call() -> None:
    called = inspect.signature(tl_headmaps.verify_tasks).parameters
    for name in ("n_items", "n_random"):
        assert f"default: {called[name].default}." in options("tasks")[f"--{name.replace('_', '-')}"].help
