"""Reading saved results with suspicion: parts that do not belong together, and files of newer versions."""

from pathlib import Path
from typing import Any

from ..core.errors import OutputError
from ..core.files import UnreadableError, parse_json, read_text, require_file
from ..core.provenance import package_versions


def read_values(path: Path) -> Any:
    """What a file of a result holds; an OutputError where it cannot be read or is no such file."""
    try:
        require_file(path)
    except UnreadableError as error:
        raise OutputError(f"Cannot read {path}: {error}. Check the path.") from error
    try:
        return _load_tensors(path) if path.suffix.lower() == ".safetensors" else parse_json(read_text(path))
    except UnreadableError as error:
        raise OutputError(
            f"{path} is not a saved result: {error}. Give the .json or .safetensors file of one."
        ) from error


def _load_tensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stream:
            values: dict[str, Any] = parse_json((stream.metadata() or {}).get("result", "null"))
            if isinstance(values, dict):
                values.update({name: stream.get_tensor(name).tolist() for name in stream.keys()})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UnreadableError(str(error)) from error
    return values


def newer_version(values: Any) -> str | None:
    """The version of this package that wrote a file, if it is newer than this one."""
    try:
        theirs = str(values["provenance"]["versions"]["tl-headmaps"])
        ours = package_versions()["tl-headmaps"]
        numbers = [tuple(int(part) for part in version.split(".")[:3]) for version in (theirs, ours)]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return theirs if numbers[0] > numbers[1] else None


def newer_error(path: Path, version: str, what: str) -> OutputError:
    """What is said about a file that a newer version wrote and this one cannot read."""
    return OutputError(
        f"{path} was saved by tl-headmaps {version:.20}, which is newer than this one "
        f"({package_versions()['tl-headmaps']}): here, {what} is not known. Update: pip install --upgrade tl-headmaps."
    )
