"""The API reference as pages that open offline, from the docstrings of the public names: ``make docs``."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pdoc
import pdoc.render

import tl_headmaps

STYLE = """
@media (min-width: 770px) { main { width: calc(68rem + var(--sidebar-width)) } }
.pdoc blockquote { margin-left: 0 }
"""
"""Room for lines of code of 120 characters."""


def build(folder: Path) -> Path:
    """Write the reference into a folder and return its page."""
    # Public names load on first use, and pdoc looks only at what is there.
    for name in tl_headmaps.__all__:
        getattr(tl_headmaps, name)
    with TemporaryDirectory() as templates:
        Path(templates, "custom.css").write_text(STYLE, encoding="utf-8")
        pdoc.render.configure(
            docformat="google",
            # Fields of results are described in their class, in one list.
            include_undocumented=False,
            show_source=False,
            search=False,
            template_directory=Path(templates),
        )
        pdoc.pdoc("tl_headmaps", "!tl_headmaps[.]", output_directory=folder)
    return folder / "tl_headmaps.html"


if __name__ == "__main__":
    sys.stdout.write(f"{build(Path(sys.argv[1]))}\n")
