"""The API reference as pages that open offline, from the docstrings of the public names: ``make docs``."""

import sys
from pathlib import Path

import pdoc
import pdoc.render

import tl_headmaps


def build(folder: Path) -> Path:
    """Write the reference into a folder and return its page."""
    # Public names load on first use, and pdoc looks only at what is there.
    for name in tl_headmaps.__all__:
        getattr(tl_headmaps, name)
    pdoc.render.configure(docformat="google", include_undocumented=False, show_source=False, search=False)
    pdoc.pdoc("tl_headmaps", "!tl_headmaps[.]", output_directory=folder)
    return folder / "tl_headmaps.html"


if __name__ == "__main__":
    sys.stdout.write(f"{build(Path(sys.argv[1]))}\n")
