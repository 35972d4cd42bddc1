"""What every result has: a kind, axes, provenance, and a file form that loads back to an equal result."""

import csv
import html
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar

from ..drawing import FIGURE_SUFFIXES, Picture, drawing_of
from ..errors import OutputError, UsageError
from ..files import replacing
from ..provenance import Provenance

if TYPE_CHECKING:
    from typing import Self

_KINDS: dict[str, type["Result"]] = {}

SAVED_SUFFIXES = (".json", ".csv", ".safetensors", ".parquet", *FIGURE_SUFFIXES)


class Result(ABC):
    """A frozen result; subclasses name their ``kind`` and say how they become JSON and rows.

    Attributes:
        kind: What sort of result it is; files carry it, so that :meth:`load` knows.
        provenance: How it was made: model and fingerprint, weight basis, options, data, seed, versions.

    Example:
        >>> from tl_headmaps import Result, value_mixing_from
        >>> mixing = value_mixing_from([[1, 0], [0.5, 0.5]], [[1.0, 2.0], [3.0, 4.0]], ["Birds", "walk"])
        >>> Result.load(mixing.save("mixing.json")) == mixing
        True
        >>> mixing.to_pandas()[["query_token", "key_token", "dot_before", "dot_after"]].values.tolist()[2]
        ['walk', 'Birds', 11.0, 8.0]
        >>> mixing.provenance.model
        'given arrays'
    """

    kind: ClassVar[str]
    methods: ClassVar[tuple[str, ...]] = ()
    provenance: Provenance

    @property
    def references(self) -> tuple[str, ...]:
        """Publications whose methods made this result, by their keys in :mod:`tl_headmaps.citations`."""
        return self.methods

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _KINDS[cls.kind] = cls

    def __eq__(self, other: object) -> bool:
        """Equal when all values and the provenance are equal."""
        return type(other) is type(self) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """What a terminal shows for a result is what it prints, not its tensors."""
        return str(self)

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, ``kind`` first and ``provenance`` last."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""

    @abstractmethod
    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One flat record per value, for CSV and data frames."""

    def to_json(self) -> str:
        """JSON text; NaN and infinity are refused rather than written."""
        lines = []
        for name, value in self.to_dict().items():
            try:
                lines.append(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}")
            except ValueError as error:
                raise OutputError(f"{name} of this {self.kind} holds NaN or infinity, which JSON cannot.") from error
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def to_csv(self) -> str:
        """CSV text with a header."""
        rows = list(self.to_rows())
        stream = io.StringIO()
        # CRLF as in RFC 4180: then a carriage return inside a field is quoted too.
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else [], lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(rows)
        return stream.getvalue()

    def to_pandas(self) -> Any:
        """A data frame with one row per value."""
        import pandas as pd

        return pd.DataFrame(list(self.to_rows()))

    def to_dataset(self) -> Any:
        """A ``datasets.Dataset`` with one row per value."""
        from datasets import Dataset

        return Dataset.from_list(list(self.to_rows()))

    def to_torch(self) -> dict[str, Any]:
        """Every array of the result as a tensor, by the name it has here and in JSON."""
        return {name: value for name in self.to_dict() if _is_tensor(value := getattr(self, name, None))}

    def to_numpy(self) -> dict[str, Any]:
        """The same as numpy arrays."""
        return {name: value.numpy(force=True) for name, value in self.to_torch().items()}

    def figure(self, **options: Any) -> Picture:
        """The picture of this result, a :class:`tl_headmaps.Figure`; options are those of its drawing."""
        return drawing_of(type(self))(self, **options)

    def _repr_html_(self) -> str:
        try:
            return self.figure()._repr_html_()
        except UsageError as error:
            # Too large to draw, for instance: a notebook shows the sentence, not a traceback.
            return f"<p>{html.escape(str(error))}</p>"

    def save(self, path: str | Path) -> Path:
        """Write the result; the suffix chooses the form.

        ``.json`` and ``.safetensors`` load back with :meth:`load`; ``.csv`` and ``.parquet`` are tables; ``.html`` is
        its picture as a page that opens offline, ``.svg``, ``.pdf`` and ``.png`` for print.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in SAVED_SUFFIXES:
            raise UsageError(
                f"{path.name!r} has no suffix that says what to write. Use one of: {', '.join(SAVED_SUFFIXES)}."
            )
        if suffix in FIGURE_SUFFIXES:
            self.figure().save(path)
            return path
        with replacing(path) as temporary:
            if suffix == ".json":
                temporary.write_text(self.to_json(), encoding="utf-8")
            elif suffix == ".csv":
                temporary.write_text(self.to_csv(), encoding="utf-8")
            elif suffix == ".parquet":
                self.to_pandas().to_parquet(temporary)
            else:
                self._save_tensors(temporary)
        return path

    def _save_tensors(self, path: Path) -> None:
        """Arrays as tensors, everything else as JSON in the header; NaN is kept as it is."""
        from safetensors.torch import save_file

        values = self.to_dict()
        tensors = {name: value.contiguous() for name, value in self.to_torch().items()}
        header = {name: value for name, value in values.items() if name not in tensors}
        save_file(tensors, path, metadata={"result": json.dumps(header, ensure_ascii=False, allow_nan=False)})

    @classmethod
    def load(cls, path: str | Path) -> "Self":
        """Read a result saved as .json or .safetensors, of this class or a subclass."""
        path = Path(path)
        try:
            values = (
                _load_tensors(path) if path.suffix.lower() == ".safetensors" else json.loads(path.read_text("utf-8"))
            )
        except OSError as error:
            raise OutputError(f"Cannot read {path}: {error.strerror or error}.") from error
        except ValueError as error:
            raise OutputError(f"{path} is not a saved result: {error}.") from error
        kind = str(values.get("kind")) if isinstance(values, dict) else type(values).__name__
        if kind not in _KINDS:
            _learn_kinds()
        found = _KINDS.get(kind)
        if found is None or not issubclass(found, cls):
            raise OutputError(
                f"{path} holds {kind!r}, but {cls.__name__} was expected. Known kinds: {', '.join(sorted(_KINDS))}."
            )
        try:
            return found.from_dict(values)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise OutputError(
                f"{path} is damaged: it says it holds {kind!r}, but {type(error).__name__} {error} came up while "
                "reading it. Save the result again."
            ) from error


def _learn_kinds() -> None:
    """Import every module of results: a class is known by name only once it is there."""
    package = import_module(__package__ or "")
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")


def _is_tensor(value: object) -> bool:
    from torch import Tensor

    return isinstance(value, Tensor)


def _load_tensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stream:
            values: dict[str, Any] = json.loads((stream.metadata() or {}).get("result", "null"))
            if isinstance(values, dict):
                values.update({name: stream.get_tensor(name).tolist() for name in stream.keys()})  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return values
