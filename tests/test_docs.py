"""What the README and the reference say is true: names exist, snippets and examples run."""

import ast
import inspect
import re
import shlex
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import website
from commands import COMMANDS
from notebooks import badge
from project import pyproject

import tl_headmaps
import tl_headmaps.renderers

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PUBLIC = [name for name in tl_headmaps.__all__ if not name.startswith("_")]


def test_the_readme_is_one_that_people_read() -> None:
    assert len(README.splitlines()) <= 160
    # Rules and bars of tables are no words.
    assert len(re.findall(r"\S*\w\S*", README)) <= 1400


def test_every_command_stands_in_the_readme() -> None:
    assert [name for name in COMMANDS if f"tl-headmaps {name}" not in README] == []


def test_the_source_archive_has_the_pages_that_lead_to_each_other() -> None:
    settings = pyproject()
    included = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"README.md", "Makefile", *website.SECTIONS["Project"]} <= set(included)


def test_commands_in_the_readme_say_all_they_need() -> None:
    """Each is parsed, none is run: what a command cannot do without must stand there too."""
    lines = [line.split("|")[0] for line in re.findall(r"(?:\$ |`)tl-headmaps ([^`\n]+)", README)]
    assert len(lines) > 20
    for line in lines:
        name, *arguments = shlex.split(line)
        if name in COMMANDS and "--help" not in arguments:
            COMMANDS[name].make_context(name, arguments)


def made_by(node: ast.AST) -> Any:
    """The class of what an expression gives, None if that is not ours; a TypeError if an argument would raise one."""
    if not isinstance(node, ast.Call):
        return None
    owner, call = None, getattr(tl_headmaps, node.func.id, None) if isinstance(node.func, ast.Name) else None
    if isinstance(node.func, ast.Attribute):
        value = node.func.value
        owner = getattr(tl_headmaps, value.id, None) if isinstance(value, ast.Name) else made_by(value)
        call = None if owner is None else getattr(owner, node.func.attr)
    if call is None:
        return None
    bound = [None] if owner is not None and not inspect.ismethod(call) else []  # the result whose method it is
    signature = inspect.signature(call)
    signature.bind(*bound, *node.args, **{str(keyword.arg): None for keyword in node.keywords})
    given = call if inspect.isclass(call) else signature.return_annotation
    if isinstance(given, str):
        given = owner if given.strip("\"'") == "Self" else getattr(tl_headmaps, given.strip("\"'"), None)
    return given if inspect.isclass(given) else None


def test_calls_and_commands_in_the_table_exist() -> None:
    """Each row's Python could be called: public names with their arguments. All of the README's commands exist."""
    questions = README.partition("## Questions")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in questions.splitlines() if line.startswith("| ")]
    calls = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    assert len(calls) > 20
    given = {"model", "scores", "phrases", "folder", "base", "tuned"}
    for call in calls:
        tree = ast.parse(call)
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert named - given <= set(PUBLIC), call
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                made_by(node)
    assert set(re.findall(r"tl-headmaps ([a-z][a-z-]+)", README)) <= set(COMMANDS)


def test_what_the_default_model_is_made_of_stands_where_its_first_number_does() -> None:
    first = README.index("```", README.index("```console") + 3)
    told = " ".join(README[first : first + 800].split())
    assert "SmolLM2-135M-Instruct" in told and "Q4_1" in told and "dequantised" in told
    assert 'load_model("HuggingFaceTB/SmolLM2-135M-Instruct")' in told


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("examples/site/*.md")), ROOT / "tests" / "benchmarks" / "README.md"],
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target.partition("#")[0]).is_file(), target


@pytest.fixture
def opened_once(default_model: Any, clean_catalogue: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tl_headmaps.load_default_model", lambda: default_model)
    monkeypatch.chdir(tmp_path)


@pytest.mark.model
def test_python_in_the_readme_runs(opened_once: None, tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, re.S)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})
    assert (tmp_path / "scores.json").exists()


def section(name: str, title: str) -> str:
    """One section of a docstring, without its heading."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", f"{inspect.getdoc(getattr(tl_headmaps, name))}\n", re.M)
    return found[1] if found else ""


def described(name: str, title: str) -> set[str]:
    """What a section lists: names before a colon, several with commas between them."""
    entries = re.findall(r"^    (\w+(?:, \w+)*): ", section(name, title), re.M)
    return {part for entry in entries for part in entry.split(", ")}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    example = section(name, "Example")
    assert "    >>> " in example, f"{name} has no example in its docstring"
    assert "from tl_headmaps import " in example, f"the example of {name} cannot be copied: its imports are missing"
    # pytest runs the examples (--doctest-modules); what is skipped or shows nothing would not be checked.
    assert "+SKIP" not in example
    assert re.search(r"^    (?!>>> |\.\.\. )\S", example, re.M), f"the example of {name} shows no output"


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isfunction(getattr(tl_headmaps, name))])
def test_every_argument_is_described(name: str) -> None:
    parameters = set(inspect.signature(getattr(tl_headmaps, name)).parameters)
    assert parameters == described(name, "Args")


@pytest.mark.parametrize("name", [name for name in PUBLIC if is_dataclass(getattr(tl_headmaps, name))])
def test_every_field_is_described(name: str) -> None:
    there = {entry.name for entry in fields(getattr(tl_headmaps, name))}
    # Every result has a provenance: it is described once, with Result.
    assert there - {"provenance"} == described(name, "Attributes") - {"provenance"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pdoc looks for typing.Self; build the site on Python 3.11")
def test_the_reference_holds_every_public_name_and_asks_no_network(tmp_path: Path) -> None:
    page = website.reference(tmp_path).read_text(encoding="utf-8")
    own_names = {getattr(tl_headmaps, name).__name__ for name in PUBLIC}  # a former name stands for the present one
    assert [name for name in own_names if f'<section id="{name}">' not in page] == []
    drawings = (tmp_path / "tl_headmaps" / "renderers.html").read_text(encoding="utf-8")
    assert [name for name in tl_headmaps.renderers.__all__ if f'<section id="{name}">' not in drawings] == []
    assert page.count("&gt;&gt;&gt;") >= len(PUBLIC)
    assert (tmp_path / "index.html").is_file()
    assert website.asking_the_network(tmp_path) == []
    # Roles of other documentation tools would stand there as raw text.
    assert not re.search(r":(?:class|func|meth|mod|data|attr):|`~", page)


@pytest.mark.parametrize(
    "text",
    [
        '<img alt="x" src="https://example.org/x.svg">',
        "<script async src=//example.org/x.js></script>",
        '<link rel="stylesheet" href="http://example.org/x.css">',
        "a { background: url('https://example.org/x.png') }",
    ],
)
def test_what_a_page_would_fetch_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f'<a href="https://example.org">a link</a><img src="x.png">{text}')
    assert len(website.asking_the_network(tmp_path)) == 1


def test_a_badge_is_words_on_the_site() -> None:
    shown = badge("01_quickstart.ipynb")
    assert shown in README
    assert website.offline(shown) == shown.replace(shown[1 : shown.index(")]") + 1], "Open in Colab")
