"""What every result has: a kind, axes, provenance, a picture, and files that load back to an equal result.

A result is a frozen dataclass, and its JSON is its fields. Four things are said beside them:

* ``json_axes``: the axes of its arrays. Labels are those of a field (``{"relation": "relations"}``) or 0, 1, 2, ...
  (``{"layer": None}``, counted in the first array whose annotation has that axis).
* ``json_extra``: properties (or methods such as ``notes``) that JSON states too, for readers without this package;
  ignored when read.
* ``former``: fields by the names that files of older versions have.
* ``nullable``: fields in which NaN means *not asked for* or *not defined*, and is null in JSON. Others refuse NaN.
* ``paper_columns``: what :meth:`Result.to_latex` shows of its rows by default; all columns if it is empty.

A field may be a result itself; its JSON is then that result's own, ``kind`` and all.

A field with the default None is left out of JSON when it is None. Results whose JSON is not their fields write their
own :meth:`Result.to_dict` and :meth:`Result.from_dict`.
"""

import functools
import html
import inspect
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..core.errors import OutputError, UsageError
from ..core.files import (
    FIGURE_SUFFIXES,
    SAVED_SUFFIXES,
    csv_text,
    home_expanded,
    replacing,
)
from ..core.options import with_torch_defaults
from ..core.provenance import Provenance
from ..renderers.figure import Figure
from ..renderers.formulas import DIGITS, MOST_DIGITS
from ..renderers.listing import text_figure
from ..renderers.tables import paper_table
from ..renderers.text import in_words, visible
from .codec import (
    SchemaError,
    annotations_of,
    axis_length,
    equal,
    fields_of,
    largest_cells,
    plain,
    require_schema,
    typed,
)
from .reading import newer_error, newer_version, read_values

if TYPE_CHECKING:
    from typing import Self

_PAPER_ROWS = 20
_READING_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""Raised by a malformed file."""


def _captioned(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A drawing method whose figures say what they were made from: the one place that does."""

    @functools.wraps(draw)
    def figure(self: "Result", *arguments: Any, **options: Any) -> Figure:
        drawn = draw(self, *arguments, **options).captioned(self.provenance.caption)
        return replace(drawn, source=self.provenance.line)

    return figure


class Result(ABC):
    """A frozen result; subclasses name their ``kind``, their axes and their rows.

    Attributes:
        kind: What sort of result it is; files carry it, so that :meth:`load` knows.
        provenance: How it was made: model and fingerprint, weight basis, options, data, seed, versions.

    Example:
        >>> from tl_headmaps import Result, ValueMixing
        >>> mixing = ValueMixing.from_arrays([[1, 0], [0.5, 0.5]], [[1.0, 2.0], [3.0, 4.0]], ["Birds", "walk"])
        >>> Result.load(mixing.save("mixing.json")) == mixing
        True
        >>> mixing.to_pandas()[["query_token", "key_token", "dot_before", "dot_after"]].values.tolist()[2]
        ['walk', 'Birds', 11.0, 8.0]
        >>> mixing.provenance.model
        'given arrays'
    """

    kind: ClassVar[str]
    methods: ClassVar[tuple[str, ...]] = ()
    json_axes: ClassVar[Mapping[str, str | None]] = {}
    json_extra: ClassVar[tuple[str, ...]] = ()
    former: ClassVar[Mapping[str, str]] = {}
    nullable: ClassVar[tuple[str, ...]] = ()
    paper_columns: ClassVar[tuple[str, ...]] = ()
    provenance: Provenance

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "figure" in vars(cls):
            cls.figure = _captioned(cls.figure)  # type: ignore[method-assign]
        _enter_with_torch_defaults(cls)

    @property
    def references(self) -> tuple[str, ...]:
        """Publications whose methods made this result, by their keys in ``core/references.bib``."""
        return self.methods

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Labels of each axis by its name."""
        return {
            name: list(range(axis_length(self, name))) if source is None else plain(getattr(self, source))
            for name, source in self.json_axes.items()
        }

    def __eq__(self, other: object) -> bool:
        """Equal when all values and the provenance are equal; NaN equals NaN."""
        return type(other) is type(self) and all(
            equal(getattr(self, entry.name), getattr(other, entry.name)) for entry in fields_of(type(self))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """What a terminal shows for a result is what it prints, not its tensors."""
        return str(self)

    def _noted(self, text: str, between: str = "\n\n") -> str:
        """A text about this result, with what its model's notes say behind it."""
        if getattr(self, "circuit", "ov") == "qk":
            return text  # notes are about values and what becomes of them
        return between.join(part for part in (text, *self.provenance.notes) if part)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, ``kind`` first and ``provenance`` last."""
        values: dict[str, Any] = {"kind": self.kind}
        if self.json_axes:
            values["axes"] = self.axes
        for entry in fields_of(type(self)):
            value = getattr(self, entry.name)
            left_out = entry.name in self.json_axes.values() or (value is None and entry.default is None)
            if not left_out and entry.name != "provenance":
                values[entry.name] = plain(value, nullable=entry.name in self.nullable)
        for name in self.json_extra:
            extra = getattr(self, name)
            values[name] = plain(extra() if callable(extra) else extra, nullable=name in self.nullable)
        values["provenance"] = self.provenance.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        hints = annotations_of(cls)
        labels = {source: values["axes"][name] for name, source in cls.json_axes.items() if source is not None}
        given = {cls.former.get(name, name): value for name, value in (values | labels).items()}
        # A field that is missing raises KeyError unless it may be left out.
        return cls(
            **{
                entry.name: typed(given[entry.name], hints[entry.name])
                for entry in fields_of(cls)
                if entry.name in given or entry.default is not None
            }
        )

    def top(self, n: int = 5) -> list[tuple[Any, float]]:
        """The ``n`` largest values, each with its labels (ties: the first)."""
        return largest_cells(self.axes, getattr(self, "values", None), n, self.kind)

    @abstractmethod
    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One flat record per value, for CSV and data frames."""

    def to_json(self) -> str:
        """JSON text; NaN and infinity are refused rather than written."""
        return "{\n" + ",\n".join(self._json_entries(self.to_dict())) + "\n}\n"

    def _json_entries(self, values: Mapping[str, Any]) -> Iterable[str]:
        for name, value in values.items():
            try:
                yield f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
            except ValueError as error:
                raise OutputError(f"{name} of this {self.kind} holds NaN or infinity, which JSON cannot.") from error

    def to_csv(self) -> str:
        """CSV text with a header; text that a spreadsheet would run as a formula has an apostrophe in front."""
        rows = list(self.to_rows())
        columns = list(rows[0]) if rows else []
        return csv_text(columns, ([row.get(name) for name in columns] for row in rows))

    def to_latex(
        self,
        *,
        columns: Sequence[str] | None = None,
        by: str | None = None,
        n: int | None = _PAPER_ROWS,
        digits: int = DIGITS,
        caption: str | None = None,
    ) -> str:
        r"""A table for a paper (booktabs): the rows of :meth:`to_csv`, with everything escaped.

        Heads are written ``L23H4``, the ends of an interval in one column, numbers with significant digits and powers
        of ten. Comments below the table say which rows were left out and what it was made from.

        Args:
            columns: Columns by their names in :meth:`to_csv`, ``head`` for layer and head; by default those that matter
                most.
            by: Column to order rows by, largest absolute value first; by default the first number, where rows are left
                out.
            n: At most this many rows; None for all.
            digits: Significant digits of numbers.
            caption: A caption; it puts a ``table`` around the ``tabular``.

        Example:
            >>> from tl_headmaps import ValueMixing
            >>> mixing = ValueMixing.from_arrays([[1, 0], [0.5, 0.5]], [[1.0, 2.0], [3.0, -4e-5]], ["a_1", "b"])
            >>> print(mixing.to_latex(columns=["query_token", "key_token", "dot_after"], by="dot_after", n=2, digits=2))
            \begin{tabular}{llr}
            \toprule
            query token & key token & dot after \\
            \midrule
            b & b & 6.0 \\
            a\_1 & a\_1 & 5.0 \\
            \bottomrule
            \end{tabular}
            % Value mixing: 2 of 4 rows, by dot_after
            % Made from given arrays ...
            <BLANKLINE>
        """
        if not 1 <= digits <= MOST_DIGITS:
            raise UsageError(f"digits={digits} cannot be written. Give 1 to {MOST_DIGITS} significant digits.")
        if n is not None and n < 1:
            raise UsageError(f"n={n} leaves no row; give 1 or more, or None for all.")
        records = list(self.to_rows())
        chosen = [name for name in self.paper_columns if any(name in record for record in records)]
        table = paper_table(records, columns=chosen if columns is None else columns, by=by, n=n, digits=digits)
        table = replace(table, note=in_words(self.kind).capitalize() + (f": {table.note}" if table.note else ""))
        return table.latex(caption, self.kind) + f"% {visible(self.provenance.line)}\n"

    def to_pandas(self) -> Any:
        """A data frame with one row per value."""
        import pandas as pd

        return pd.DataFrame(list(self.to_rows()))

    def to_dataset(self) -> Any:
        """A ``datasets.Dataset`` with one row per value."""
        from datasets import Dataset

        return Dataset.from_list(list(self.to_rows()))

    def to_torch(self) -> dict[str, Tensor]:
        """Every array of the result as a tensor, by the name it has here and in JSON."""
        return {name: value for name in self.to_dict() if isinstance(value := getattr(self, name, None), Tensor)}

    def to_numpy(self) -> dict[str, Any]:
        """The same as numpy arrays."""
        return {name: value.numpy(force=True) for name, value in self.to_torch().items()}

    @_captioned
    def figure(self) -> Figure:
        """The picture of this result; one without a picture of its own shows its printed form."""
        return text_figure(str(self), title=in_words(self.kind).capitalize())

    def _repr_html_(self) -> str:
        try:
            return self.figure()._repr_html_()
        except UsageError as error:
            # Too large to draw, for instance: a notebook shows the sentence, not a traceback.
            return f"<p>{html.escape(str(error))}</p>"

    def save(self, path: str | Path) -> Path:
        """Write the result; the suffix chooses the form.

        ``.json`` and ``.safetensors`` load back with :meth:`load`; ``.csv`` and ``.parquet`` are tables, ``.tex`` one
        for a paper (:meth:`to_latex`); ``.html`` is its picture as a page that opens offline, ``.svg``, ``.pdf`` and
        ``.png`` for print.
        """
        path = home_expanded(path)
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
            elif suffix == ".tex":
                temporary.write_text(self.to_latex(), encoding="utf-8")
            elif suffix == ".parquet":
                self.to_pandas().to_parquet(temporary)
            else:
                self._save_tensors(temporary)
        return path

    def _save_tensors(self, path: Path) -> None:
        """Arrays as tensors, everything else as JSON in the header; NaN is kept as it is."""
        from safetensors.torch import save

        values = self.to_dict()
        tensors = {name: value.contiguous() for name, value in self.to_torch().items()}
        header = self._json_entries({name: value for name, value in values.items() if name not in tensors})
        # As bytes: the library's own errors about a full disk are not those of Python.
        path.write_bytes(save(tensors, metadata={"result": "{" + ", ".join(header) + "}"}))

    @classmethod
    def load(cls, path: str | Path) -> "Self":
        """Read a result saved as .json or .safetensors, of this class or a subclass."""
        path = home_expanded(path)
        values = read_values(path)
        kind = str(values.get("kind")) if isinstance(values, dict) else type(values).__name__
        result_class = kinds().get(kind)
        newer = newer_version(values)
        unknown = [] if result_class is None else _unknown_fields(result_class, values)
        if newer is not None and (result_class is None or unknown):
            raise newer_error(
                path, newer, f"the kind {kind!r}" if result_class is None else f"its field {unknown[0]!r}"
            )
        if result_class is None or not issubclass(result_class, cls):
            raise OutputError(
                f"{path} holds {kind!r}, but {cls.__name__} was expected. Known kinds: {', '.join(sorted(kinds()))}."
            )
        try:
            result = result_class.from_dict(values)
            _require_sound(result, values)
            if path.suffix.lower() == ".json":
                # Numbers that no JSON can hold come in as text where a class reads a form of its own.
                result.to_json()
            return result
        except (*_READING_ERRORS, OutputError) as error:
            if newer is not None:
                raise newer_error(path, newer, f"all of this {kind!r}") from error
            reason = str(error) if isinstance(error, SchemaError) else f"{type(error).__name__} {error}"
            raise OutputError(
                f"{path} is damaged: it says it holds {kind!r}, but {reason:.300} came up while reading it. Save the "
                "result again."
            ) from error


def _enter_with_torch_defaults(result_class: type) -> None:
    """Have the public methods of a class compute under torch's defaults, and what prints it; properties only look."""
    for name, value in list(vars(result_class).items()):
        if name in ("__str__", "_repr_html_") or not name.startswith("_"):
            if inspect.isfunction(value):
                setattr(result_class, name, with_torch_defaults()(value))
            elif isinstance(value, classmethod | staticmethod):
                setattr(result_class, name, type(value)(with_torch_defaults()(value.__func__)))


_enter_with_torch_defaults(Result)


def _writes_own_form(result_class: type[Result]) -> bool:
    return any("to_dict" in vars(parent) for parent in result_class.__mro__ if parent is not Result)


def _unknown_fields(result_class: type[Result], values: Any) -> list[str]:
    """Names in a file that this version of the class does not write; none where the class writes its own form."""
    if _writes_own_form(result_class):
        return []
    known = {
        "kind",
        "axes",
        *result_class.former,
        *result_class.json_extra,
        *(entry.name for entry in fields_of(result_class)),
    }
    return sorted(str(name) for name in values if name not in known)


def _require_sound(result: Result, values: Mapping[str, Any]) -> None:
    """Raise unless the fields of a result that was read have their types and belong together.

    Arrays that share an axis have the same length along it, and labels are as many. What no annotation says shows when
    the result is printed and its rows are listed.
    """
    sizes: dict[str, int] = {}
    own_form = _writes_own_form(type(result))
    axes = result.axes
    if values.get("axes", axes) != axes:
        raise SchemaError("axes that are not those of its arrays")
    for name, source in result.json_axes.items():
        if source is not None:
            sizes[name] = len(axes[name])
    for entry in fields_of(type(result)):
        value, hint = getattr(result, entry.name), annotations_of(type(result))[entry.name]
        if isinstance(value, Result):
            _require_sound(value, values[entry.name])
            continue
        require_schema(value, hint, entry.name, sizes, nullable=own_form or entry.name in result.nullable)
    # A number beyond all floats (1e400) is read as infinity, which no file can hold again.
    json.dumps(result.provenance.to_dict(), allow_nan=False)
    str(result)
    for _ in result.to_rows():
        pass


def kinds() -> dict[str, type[Result]]:
    """Every public result class by its kind."""
    package = sys.modules[__name__.partition(".")[0]]
    public = (getattr(package, name) for name in package.__all__)
    return {
        value.kind: value
        for value in public
        if isinstance(value, type) and issubclass(value, Result) and value is not Result
    }
