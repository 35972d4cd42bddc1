"""Notebooks in a fresh kernel: of this environment's Python, with this tree first on its path."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]


def execute(notebook: Any, folder: Path, seconds_per_cell: int = 600) -> str:
    """Run all cells with ``folder`` as working directory, outputs into the notebook; what went to stderr comes back.

    A failing cell raises nbclient's CellExecutionError, which shows its source and traceback.
    """
    # Without folders of kernels, "python3" is ipykernel's own: this interpreter, not one that a user registered.
    manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), kernel_name="python3")
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    client = NotebookClient(notebook, km=manager, timeout=seconds_per_cell)
    # A kernel that is stopped may leave its temporary files behind, and a model among them is half a gigabyte.
    with TemporaryDirectory() as scratch:
        settings = {"PYTHONPATH": os.pathsep.join(path), "IPYTHONDIR": scratch, "TMPDIR": scratch}
        client.execute(cleanup_kc=True, env=os.environ | settings, cwd=str(folder))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.get("name") == "stderr")
