"""What every result has: a kind, axes, provenance, and a file form that loads back to an equal result."""

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import OutputError, UsageError
from ..files import write_text
from ..provenance import Provenance

if TYPE_CHECKING:
    from typing import Self

_KINDS: dict[str, type["Result"]] = {}


class Result(ABC):
    """A frozen result; subclasses name their ``kind`` and say how they become JSON and rows."""

    kind: ClassVar[str]
    provenance: Provenance

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _KINDS[cls.kind] = cls

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
        lines = (
            f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
            for name, value in self.to_dict().items()
        )
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def to_csv(self) -> str:
        """CSV text with a header."""
        rows = list(self.to_rows())
        stream = io.StringIO()
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return stream.getvalue()

    def to_pandas(self) -> Any:
        """A data frame with one row per value."""
        import pandas as pd

        return pd.DataFrame(list(self.to_rows()))

    def save(self, path: str | Path) -> Path:
        """Write the result; the suffix chooses the form (.json loads back, .csv is a table)."""
        path = Path(path)
        write_text(path, self.encoder(path)())
        return path

    def encoder(self, path: Path) -> Any:
        """The method that makes the file's text, or a UsageError for a suffix that is not known."""
        encoders = {".json": self.to_json, ".csv": self.to_csv}
        if path.suffix.lower() not in encoders:
            raise UsageError(f"{path.name!r} has no suffix that says what to write. Use one of: {', '.join(encoders)}.")
        return encoders[path.suffix.lower()]

    @classmethod
    def load(cls, path: str | Path) -> "Self":
        """Read a result saved as JSON, of this class or a subclass."""
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise OutputError(f"Cannot read {path}: {error.strerror or error}.") from error
        except ValueError as error:
            raise OutputError(f"{path} is not a saved result: {error}.") from error
        kind = str(values.get("kind")) if isinstance(values, dict) else type(values).__name__
        found = _KINDS.get(kind)
        if found is None or not issubclass(found, cls):
            raise OutputError(
                f"{path} holds {kind!r}, but {cls.__name__} was expected. Known kinds: {', '.join(sorted(_KINDS))}."
            )
        return found.from_dict(values)
