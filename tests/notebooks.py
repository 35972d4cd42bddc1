"""The numbered notebooks, run and stored: ``make notebooks`` (``ARGS="03 05"`` for some of them).

Each runs in a fresh kernel of this environment's Python, with this tree first on its path. Stored are the outputs of
that run, with figures as static images, which GitHub shows; what differs from run to run (progress bars, times of
cells) is left out. The tests run the same function and compare.
"""

import base64
import io
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from project import ROOT, pyproject

EXAMPLES = sorted((ROOT / "examples").glob("*.ipynb"))
COLAB = "https://colab.research.google.com/"
BADGE = re.compile(rf"\[!\[Open in Colab\]\({re.escape(COLAB)}assets/colab-badge\.svg\)\]\([^)]*\)")

INSTALLATION = """\
# On Colab only: the clone that this notebook lies in, or else the released package.
import sys
from pathlib import Path

if "google.colab" in sys.modules:
    source = ".." if Path("../pyproject.toml").is_file() else "tl-headmaps"
    print("Installing", "the clone around this notebook" if source == ".." else "the released package")
    %pip install --quiet "{source}[demo]"
"""

STARTUP = """\
from tempfile import TemporaryDirectory
from pathlib import Path


def drawn(shown):
    if not type(shown).__module__.startswith("tl_headmaps."):
        return None
    figure = shown.figure() if hasattr(shown, "figure") else shown
    if type(figure).__name__ != "Figure" or type(figure.data).__name__ == "Listing":
        return None  # text is better shown as text
    with TemporaryDirectory() as folder:
        return figure.save(Path(folder) / "figure.png").read_bytes()


get_ipython().display_formatter.formatters["image/png"].for_type(object, drawn)
"""
"""What a kernel does before the first cell: figures and results have a static image beside their page."""


def badge(name: str) -> str:
    """Opens a notebook on Colab: from where pyproject.toml says the sources are, else Colab's own dialogue."""
    source = pyproject()["project"].get("urls", {}).get("Source", "")
    _, _, repository = source.partition("https://github.com/")
    target = f"{COLAB}github/{repository}/blob/main/examples/{name}" if repository else COLAB
    return f"[![Open in Colab]({COLAB}assets/colab-badge.svg)]({target})"


def execute(notebook: Any, folder: Path, seconds_per_cell: int = 600) -> str:
    """Run all cells with ``folder`` as working directory, outputs into the notebook; what went to stderr comes back.

    A failing cell raises nbclient's CellExecutionError, which shows its source and traceback.
    """
    # Without folders of kernels, "python3" is ipykernel's own: this interpreter, not one that a user registered.
    manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), kernel_name="python3")
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    client = NotebookClient(notebook, km=manager, timeout=seconds_per_cell, record_timing=False)
    # A kernel that is stopped may leave its temporary files behind, and a model among them is half a gigabyte.
    with TemporaryDirectory() as scratch:
        startup = Path(scratch, "profile_default", "startup")
        startup.mkdir(parents=True)
        (startup / "images.py").write_text(STARTUP, encoding="utf-8")
        settings = {"PYTHONPATH": os.pathsep.join(path), "IPYTHONDIR": scratch, "TMPDIR": scratch}
        client.execute(cleanup_kc=True, env=os.environ | settings, cwd=str(folder))
    return "".join(output.text for output in outputs_of(notebook) if output.get("name") == "stderr")


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


STORED_DPI = 144
"""Pages show an image pixel by pixel: its letters are then about as large as those of the text around it."""


def for_a_page(image: str) -> str:
    """A smaller image, of the size in which it is shown and with few colours."""
    from PIL import Image

    smaller = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(image))) as picture:
        share = min(1.0, STORED_DPI / float(picture.info.get("dpi", (STORED_DPI,))[0]))
        size = round(picture.width * share), round(picture.height * share)
        picture.convert("RGB").resize(size, Image.Resampling.LANCZOS).quantize(
            256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        ).save(smaller, "png", optimize=True)
    return base64.b64encode(smaller.getvalue()).decode()


def make_storable(notebook: Any) -> None:
    """Leave out what only a running page shows, and what another run would not print again."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    for output in outputs_of(notebook):
        output.pop("metadata", None) if output.output_type == "stream" else output.update(metadata={})
        data = output.get("data", {})
        if 'class="tlhm"' in data.get("text/html", ""):
            del data["text/html"]
        if "image/png" in data:
            data["image/png"] = for_a_page(data["image/png"])


def run(path: Path, folder: Path) -> tuple[Any, str]:
    """A notebook with the outputs of a fresh run, and what went to stderr."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook, execute(notebook, folder)


def main() -> None:
    for path in EXAMPLES:
        if sys.argv[1:] and path.name[:2] not in sys.argv[1:]:
            continue
        with TemporaryDirectory() as folder:
            notebook, _ = run(path, Path(folder))
        make_storable(notebook)
        first = notebook.cells[0]
        first.source = BADGE.sub(lambda _, name=path.name: badge(name), first.source)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
