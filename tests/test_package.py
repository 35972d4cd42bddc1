"""The package as a whole: which way imports point, what an import costs, what the wheel holds."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from calls import traced
from project import pyproject

import tl_headmaps
from tl_headmaps.cli import doctor

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tl_headmaps"
MODULES = sorted(PACKAGE.rglob("*.py"))

ORDER = ("core", "data", "capture", "circuits", "scorers", "naming", "renderers", "results", "analyses", "cli")
"""A room imports from itself and from the rooms before it."""

LEVEL = {part: level for level, part in enumerate(ORDER)}
LEVEL |= {"__init__": len(ORDER) - 1, "__main__": len(ORDER) - 1}
"""The public names stand on top: only the command line may import them."""

CAPTURE = (
    *("mapped", "tensors", "parts", "forward", "isolation", "adapters", "anatomy", "selfcheck", "norms", "measuring"),
    *("requirements", "host", "checkpoint", "quantisation", "weights"),
    *("installs", "multimodal", "bundled", "loading", "running", "components"),
)
"""The same inside ``capture/``."""

MACHINE_PATHS = ("/" + "work/", "/tmp/" + "v", "/" + "root/")
"""Spelled in two halves, so that this file does not mention them itself."""


def part_of(path: Path) -> str:
    """``circuits`` for tl_headmaps/circuits/ov.py, ``types`` for tl_headmaps/types.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[ast.stmt, str, tuple[str, ...]]]:
    """Every import of a module, wherever it stands: statement, dotted name, names of functions around it."""
    package = ["tl_headmaps", *path.relative_to(PACKAGE).parts[:-1]]

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[ast.stmt, str, tuple[str, ...]]]:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node, f"{module}.{alias.name}", inside) for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = (*inside, node.name)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), ())


def target_part(name: str) -> str:
    """The part of the package a dotted name belongs to; public names belong to ``__init__``."""
    first = name.split(".")[1] if "." in name else "__init__"
    is_part = (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file()
    return first if is_part else "__init__"


def test_every_part_has_a_place_in_the_order() -> None:
    parts = {part_of(path) for path in MODULES}
    assert parts <= set(LEVEL), f"give {sorted(parts - set(LEVEL))} a row in ORDER and in the design"


def test_every_part_but_naming_runs_under_the_type_checker() -> None:
    options = pyproject()["tool"]["pytest"]["ini_options"]
    listed = next(option for option in options["addopts"] if "--jaxtyping-packages" in option)
    checked = {name.removeprefix("tl_headmaps.") for name in listed.split("=")[1].split(",")[:-1]}
    assert checked == {part_of(path) for path in MODULES} - {"naming", "__init__", "__main__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    own = part_of(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    offending = []
    for node, name, _ in imported(path):
        if name.split(".")[0] != "tl_headmaps":
            continue
        if LEVEL[target_part(name)] > LEVEL[own]:
            offending.append(f"{path.relative_to(ROOT)}:{node.lineno}: {lines[node.lineno - 1].strip()}")
    assert not offending, "imports from a row below:\n" + "\n".join(offending)


@pytest.mark.parametrize("path", sorted((PACKAGE / "capture").rglob("*.py")), ids=lambda path: path.stem)
def test_imports_inside_capture_point_one_way(path: Path) -> None:
    def inner(parts: Sequence[str]) -> str:
        return parts[1].removesuffix(".py") if len(parts) > 1 else "__init__"

    own = inner(path.relative_to(PACKAGE).parts)
    if own == "__init__":
        return
    assert own in CAPTURE, f"give {own} a place in CAPTURE"
    for node, name, _ in imported(path):
        if name.startswith("tl_headmaps.capture."):
            target = inner(name.split(".")[1:])
            assert CAPTURE.index(target) <= CAPTURE.index(own), f"line {node.lineno} imports from {target}"


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "calls.py"), str(tmp_path_factory.mktemp("calls")), ",".join(ORDER)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", ["relation_scores", "component_map", "component_map of the weights", "task_maps"])
def test_no_room_calls_a_later_one(name: str, calls: dict[str, Any]) -> None:
    answer = calls[name]
    assert not answer["upward"], "calls from a room to a later one:\n" + "\n".join(answer["upward"])
    # The whole way was seen, and the figure of a result is drawn by a method of its own.
    assert answer["calls"] > 1000 and answer["handed"] >= 1


def test_a_call_to_a_later_room_would_be_seen() -> None:
    below: dict[str, Any] = {}
    above: dict[str, Any] = {"registry": below}
    lines = "def from_a_registry(): return registered()\ndef handed(task): return task()\n"
    exec(compile(lines, str(PACKAGE / "core" / "below.py"), "exec"), below)
    lines = "def task(): return 1\ndef hand(handed): return handed(task)\n"
    exec(compile(lines, str(PACKAGE / "analyses" / "above.py"), "exec"), above)
    below["registered"] = above["task"]
    assert traced(lambda: above["hand"](below["handed"]), list(ORDER)) == {"calls": 2, "handed": 1, "upward": []}
    answer = traced(below["from_a_registry"], list(ORDER))
    assert answer["upward"] == ["core/below.py:from_a_registry calls analyses/above.py:task"]


def test_only_capture_knows_the_host() -> None:
    knowing = {
        part_of(path)
        for path in MODULES
        for _, name, _ in imported(path)
        if name.split(".")[0] in {"transformer_lens", "transformers"}
    }
    assert knowing <= {"capture"}


def test_importing_the_package_costs_nothing() -> None:
    heavy = ("torch", "transformer_lens", "transformers", "numpy", "pandas", "datasets", "circuitsvis")
    command = f"import sys, tl_headmaps; print(sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


ALIASES = {"MetVectors": "ContextVectors"}
"""Old public names of what is called otherwise now."""


@pytest.mark.parametrize("name", tl_headmaps.__all__)
def test_public_names_resolve_and_say_what_they_are(name: str) -> None:
    assert name in dir(tl_headmaps)
    value = getattr(tl_headmaps, name)
    if name == "__version__":
        assert isinstance(value, str)
        return
    assert value.__name__ == ALIASES.get(name, name) and value.__module__.startswith("tl_headmaps.")
    # A dataclass without a docstring gets its own signature as one.
    assert value.__doc__ and not value.__doc__.startswith(f"{name}(")


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match=r"attribute.*relation_scorez"):
        _ = tl_headmaps.relation_scorez


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_module_opens_with_its_idea(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_requirements_cover_the_imports() -> None:
    project = pyproject()["project"]
    assert isinstance(project, dict)
    # What an extra brings is imported inside functions, with a sentence that names the extra.
    listed = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    named = [re.match(r"[\w.-]+", requirement) for requirement in listed]
    required = {normalised(match[0]) for match in named if match}
    owners = packages_distributions()
    missing = {}
    for path in MODULES:
        for node, name, _ in imported(path):
            top = name.split(".")[0]
            if top == "tl_headmaps" or top in sys.stdlib_module_names:
                continue
            if not {normalised(owner) for owner in owners.get(top, [top])} & required:
                missing[top] = f"{path.relative_to(ROOT)}:{node.lineno}"
    assert not missing, f"imported, but not among the dependencies: {missing}"


def test_extras_bring_what_doctor_says_and_versions_are_known() -> None:
    extras: dict[str, list[str]] = pyproject()["project"]["optional-dependencies"]
    for package, (_, extra) in doctor._OPTIONAL.items():
        assert not extra or any(package in requirement for requirement in extras[extra]), f"{extra} has no {package}"
    known = {normalised(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    named = [re.match(r"[\w.-]+", requirement) for extra in extras.values() for requirement in extra]
    wanted = {normalised(match[0]) for match in named if match} - {"tl-headmaps"}
    assert wanted <= known, f"constraints.txt does not say which {sorted(wanted - known)}"


def test_the_version_is_written_once_and_cited_alike() -> None:
    settings = pyproject()
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["hatch"]["version"]["path"] == "tl_headmaps/__init__.py"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == tl_headmaps.__version__


def tracked_files() -> Iterator[Path]:
    """The files of the checkout without what .gitignore names."""
    ignored = [line.strip().strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.strip()]

    def visit(folder: Path) -> Iterator[Path]:
        for entry in sorted(folder.iterdir()):
            if entry.name == ".git" or any(entry.match(pattern) for pattern in ignored):
                continue
            if entry.is_dir():
                yield from visit(entry)
            else:
                yield entry

    return visit(ROOT)


def test_no_file_names_a_folder_of_one_machine() -> None:
    mentions = []
    for path in tracked_files():
        for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), 1):
            mentions += [f"{path.relative_to(ROOT)}:{number}: {found}" for found in MACHINE_PATHS if found in line]
    assert not mentions, "\n".join(mentions)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_everything(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "relations_data").rglob("*.*")}
    assert {"relations_data/knowledge/country_to_capital.json", "relations_data/text/english.txt"} <= data
    assert {f"tl_headmaps/{name}" for name in data} <= names
    assert {path.relative_to(ROOT).as_posix() for path in MODULES} <= names
    assets = {path.relative_to(ROOT).as_posix() for path in (PACKAGE / "renderers" / "assets").iterdir()}
    assert assets and assets <= names
    assert {"tl_headmaps/py.typed", "tl_headmaps/core/references.bib"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


def test_the_wheel_says_its_version_and_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"tl_headmaps-{tl_headmaps.__version__}.dist-info"
    assert f"Version: {tl_headmaps.__version__}" in archive.read(f"{info}/METADATA").decode().splitlines()
    entry = "tl-headmaps = tl_headmaps.cli.app:main"
    assert entry in archive.read(f"{info}/entry_points.txt").decode().splitlines()


def has_categories(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*/*.json"))


def test_an_installed_wheel_finds_its_relations(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", str(site), str(wheel)], capture_output=True, check=True)
    command = "import tl_headmaps.data.relations as r; print(r.__file__); print(r.data_folder())"
    done = subprocess.run(
        [sys.executable, "-c", command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    module, folder = map(Path, done.stdout.splitlines())
    assert module.is_relative_to(site)
    assert folder == site / "tl_headmaps" / "relations_data"
    assert has_categories(folder)


def test_a_checkout_finds_its_relations() -> None:
    folder = import_module("tl_headmaps.data.relations").data_folder()
    assert isinstance(folder, Path)
    assert folder.resolve() == ROOT / "relations_data"
    assert has_categories(folder)
