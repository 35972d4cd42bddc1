"""The site, pages that open offline: ``make docs``.

Sphinx with MyST-NB lays out what the repository holds anyway: README, guide, notebooks with their stored outputs, the
tables that the tests write. pdoc writes the reference from the docstrings of the public names.
"""

import inspect
import re
import shutil
import sys
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

import pdoc
import pdoc.render

import tl_headmaps
import tl_headmaps.renderers

ROOT = Path(__file__).parents[2]
WIDER = """
.main { min-width: 0 }
.content { box-sizing: border-box; max-width: 100%; width: 68em }
@media (min-width: 770px) { main { width: calc(68rem + var(--sidebar-width)) } }
.pdoc blockquote { margin-left: 0 }
article table.docutils { font-size: .85em }
article table.docutils td:last-child { min-width: 16em }
"""
"""Room for lines of code of 120 characters where the window has it: below, wide blocks scroll and the page does not.

The last column of a table has the remarks, which would make rows tall."""

SECTIONS = {
    "Start": ["examples/site/guide.md", "examples/site/gallery.md"],
    "Notebooks": ["examples/*.ipynb"],
    "Evidence": ["tests/calibration/table.md", "tests/architectures.md", "tests/benchmarks/README.md"],
    "Project": ["CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md"],
}
SETTINGS = {
    "project": "tl_headmaps",
    "version": tl_headmaps.__version__,
    "extensions": ["myst_nb"],
    "root_doc": "index",
    "html_theme": "furo",
    "html_title": "tl_headmaps",
    "html_static_path": ["static"],
    "html_css_files": ["wider.css"],
    "html_show_copyright": False,
    # Notebooks show what is stored in them.
    "nb_execution_mode": "off",
    "nb_render_markdown_format": "gfm",  # tables, too
    "myst_heading_anchors": 3,
    "suppress_warnings": ["misc.highlighting_failure"],
}
CALIBRATION = """\
# Calibration

Every p-value, interval and verdict, tried on heads that know nothing (`make calibrate`): how often p-values fall
below .05 and .01, how often intervals hold the true value, how often a verdict is false.

"""
BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]")
REMOTE = re.compile(
    r"""<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^"' >]+"""
    r"""|(?:url\(|@import )["']?(?:https?:)?//"""
)
"""What a browser would fetch while it shows a page; links that a reader may follow are none of it."""


def reference(folder: Path) -> Path:
    """Write the reference into a folder and return the page of the public names."""
    # Public names load on first use, and pdoc looks only at what is there.
    for package in (tl_headmaps, tl_headmaps.renderers):
        for name in package.__all__:
            getattr(package, name)
    with TemporaryDirectory() as templates:
        Path(templates, "custom.css").write_text(WIDER, encoding="utf-8")
        pdoc.render.configure(
            docformat="google",
            # Fields of results are described in their class, in one list.
            include_undocumented=False,
            show_source=False,
            search=False,
            template_directory=Path(templates),
        )
        pdoc.pdoc("tl_headmaps", "tl_headmaps.renderers", "!tl_headmaps[.](?!renderers$)", output_directory=folder)
    return folder / "tl_headmaps.html"


def lay_out(source: Path) -> None:
    """Sphinx's sources: copies at their own paths, so that links between them hold, and the README as first page."""
    listed = {
        title: [path for entry in found for path in sorted(ROOT.glob(entry))] for title, found in SECTIONS.items()
    }
    (source / "static").mkdir()
    (source / "static" / "wider.css").write_text(WIDER, encoding="utf-8")
    for path in [path for paths in listed.values() for path in paths]:
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = offline(path.read_text(encoding="utf-8"))
        copy.write_text(CALIBRATION + text if path.name == "table.md" else text, encoding="utf-8")
    shutil.copytree(ROOT / "examples" / "gallery", source / "examples" / "gallery")
    trees = []
    for title, paths in listed.items():
        entries = "\n".join(path.relative_to(ROOT).with_suffix("").as_posix() for path in paths)
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n:maxdepth: 1\n\n{entries}\n```\n")
    (source / "reference.md").write_text(contents(), encoding="utf-8")
    trees.append("```{toctree}\n:hidden:\n:caption: Reference\n\nreference\n```\n")
    readme = offline((ROOT / "README.md").read_text(encoding="utf-8"))
    (source / "index.md").write_text(readme + "\n" + "\n".join(trees), encoding="utf-8")


def contents() -> str:
    """Every public name with its first sentence, leading to its place in the reference."""
    text = "# Reference\n\n"
    for package, title in ((tl_headmaps, "Analyses and results"), (tl_headmaps.renderers, "Drawings of plain arrays")):
        text += f"## {title}\n\n<ul>\n"
        for name in sorted(set(package.__all__) - {"__version__"}):
            first = (inspect.getdoc(getattr(package, name)) or "").split("\n\n")[0].replace("\n", " ")
            sentence = escape(re.sub(r":\w+:|`~?", "", first))
            address = f"reference/{package.__name__.replace('.', '/')}.html#{name}"
            text += f'<li><a href="{address}"><code>{name}</code></a>: {sentence}</li>\n'
        text += "</ul>\n\n"
    return text


def offline(text: str) -> str:
    """A badge is a picture from the network: its words will do."""
    return BADGE.sub("[Open in Colab]", text)


def asking_the_network(folder: Path) -> list[str]:
    """Pages and styles that would not open whole without a network, each with the place."""
    files = [path for kind in ("html", "css") for path in sorted(folder.rglob(f"*.{kind}"))]
    texts = ((path, path.read_text(encoding="utf-8")) for path in files)
    return [f"{path.relative_to(folder)}: {found[0]}" for path, text in texts for found in REMOTE.finditer(text)]


def build(folder: Path) -> Path:
    """Write the site into a folder and return its first page; what Sphinx warns of is an error."""
    from sphinx.application import Sphinx

    with TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        source.mkdir()
        lay_out(source)
        shutil.rmtree(folder, ignore_errors=True)
        app = Sphinx(
            source, None, folder, Path(scratch, "doctrees"), "html", SETTINGS, status=None, warningiserror=True
        )
        app.build(force_all=True)
        if app.statuscode:
            raise SystemExit("The site has the faults above.")
    reference(folder / "reference")
    if remote := asking_the_network(folder):
        raise SystemExit("\n".join(["The site does not open offline:", *remote]))
    return folder / "index.html"


if __name__ == "__main__":
    sys.stdout.write(f"{build(Path(sys.argv[1]).resolve())}\n")
