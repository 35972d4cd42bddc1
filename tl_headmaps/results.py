"""What every result has: a kind, axes, provenance, a picture, and files that load back to an equal result.

A result is a frozen dataclass, and its JSON is its fields. Three things are said beside them:

* ``json_axes``: the axes of its arrays. Labels are those of a field (``{"relation": "relations"}``) or 0, 1, 2, ...
  (``{"layer": None}``, counted in the first array whose annotation has that axis).
* ``json_extra``: properties that JSON states too, for readers without this package; ignored when read.
* ``nullable``: fields in which NaN means *not asked for* or *not defined*, and is null in JSON. Others refuse NaN.
* ``paper_columns``: what :meth:`Result.to_latex` shows of its rows by default; all columns if it is empty.

A field may be a result itself; its JSON is then that result's own, ``kind`` and all.

A field with the default None is left out of JSON when it is None. Results whose JSON is not their fields write their
own :meth:`Result.to_dict` and :meth:`Result.from_dict`.
"""

import functools
import html
import itertools
import json
import math
import sys
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .core.ambient import steady
from .core.errors import OutputError, UsageError
from .core.files import (
    FIGURE_SUFFIXES,
    SAVED_SUFFIXES,
    UnreadableError,
    csv_text,
    home_expanded,
    parse_json,
    read_text,
    replacing,
    require_file,
)
from .core.fitting import MisfitError, annotations_of, require_fit
from .core.provenance import Provenance, package_versions
from .core.types import HeadIndex, HeadLike, LayerLike, head_list, layer_list
from .renderers.figure import Figure
from .renderers.formulas import DIGITS, MOST_DIGITS
from .renderers.listing import text_figure
from .renderers.tables import paper_table
from .renderers.text import in_words, visible

if TYPE_CHECKING:
    from typing import Self

_PAPER_ROWS = 20
_Any_Result = TypeVar("_Any_Result", bound="Result")


def _captioned(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A drawing method whose figures say what they were made from: the one place that does."""

    @functools.wraps(draw)
    def figure(self: "Result", *arguments: Any, **options: Any) -> Figure:
        drawn = draw(self, *arguments, **options).captioned(self.provenance.caption)
        return replace(drawn, source=self.provenance.line)

    return figure


@steady
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
    nullable: ClassVar[tuple[str, ...]] = ()
    paper_columns: ClassVar[tuple[str, ...]] = ()
    provenance: Provenance

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "figure" in vars(cls):
            cls.figure = _captioned(cls.figure)  # type: ignore[method-assign]
        steady(cls)

    @property
    def references(self) -> tuple[str, ...]:
        """Publications whose methods made this result, by their keys in ``core/references.bib``."""
        return self.methods

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Labels of each axis by its name."""
        return {
            name: list(range(_size(self, name))) if source is None else _plain(getattr(self, source))
            for name, source in self.json_axes.items()
        }

    def __eq__(self, other: object) -> bool:
        """Equal when all values and the provenance are equal; NaN equals NaN."""
        return type(other) is type(self) and all(
            _equal(getattr(self, entry.name), getattr(other, entry.name)) for entry in _fields(type(self))
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
        for entry in _fields(type(self)):
            value = getattr(self, entry.name)
            left_out = entry.name in self.json_axes.values() or (value is None and entry.default is None)
            if not left_out and entry.name != "provenance":
                values[entry.name] = _plain(value, nullable=entry.name in self.nullable)
        values |= {name: _plain(getattr(self, name), nullable=name in self.nullable) for name in self.json_extra}
        values["provenance"] = self.provenance.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        hints = annotations_of(cls)
        labels = {source: values["axes"][name] for name, source in cls.json_axes.items() if source is not None}
        given = {**values, **labels}
        # A field that is missing raises KeyError unless it may be left out.
        return cls(
            **{
                entry.name: _typed(given[entry.name], hints[entry.name])
                for entry in _fields(cls)
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
        lines = []
        for name, value in self.to_dict().items():
            try:
                lines.append(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}")
            except ValueError as error:
                raise OutputError(f"{name} of this {self.kind} holds NaN or infinity, which JSON cannot.") from error
        return "{\n" + ",\n".join(lines) + "\n}\n"

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
        header = {name: value for name, value in values.items() if name not in tensors}
        # As bytes: the library's own errors about a full disk are not those of Python.
        path.write_bytes(save(tensors, metadata={"result": json.dumps(header, ensure_ascii=False, allow_nan=False)}))

    @classmethod
    def load(cls, path: str | Path) -> "Self":
        """Read a result saved as .json or .safetensors, of this class or a subclass."""
        path = home_expanded(path)
        try:
            require_file(path)
        except UnreadableError as error:
            raise OutputError(f"Cannot read {path!s:.200}: {error}. Check the path.") from error
        try:
            values = _load_tensors(path) if path.suffix.lower() == ".safetensors" else parse_json(read_text(path))
        except UnreadableError as error:
            raise OutputError(
                f"{path} is not a saved result: {error}. Give the .json or .safetensors file of one."
            ) from error
        kind = str(values.get("kind")) if isinstance(values, dict) else type(values).__name__
        result_class = kinds().get(kind)
        newer = _newer_version(values)
        unknown = [] if result_class is None else _unknown_fields(result_class, values)
        if newer is not None and (result_class is None or unknown):
            raise _from_newer(
                path, newer, f"the kind {kind!r}" if result_class is None else f"its field {unknown[0]!r}"
            )
        if result_class is None or not issubclass(result_class, cls):
            raise OutputError(
                f"{path} holds {kind!r:.80}, but {cls.__name__} was expected. Known kinds: "
                f"{', '.join(sorted(kinds()))}."
            )
        try:
            result = _checked(result_class.from_dict(values), values)
            if _holds_own_form(result) and path.suffix.lower() == ".json":
                # Numbers that no JSON can hold come in as text that a form of its own turns into numbers.
                result.to_json()
            return result
        except (
            OutputError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            if newer is not None:
                raise _from_newer(path, newer, f"all of this {kind!r}") from error
            reason = str(error) if isinstance(error, MisfitError) else f"{type(error).__name__} {error}"
            raise OutputError(
                f"{path} is damaged: it says it holds {kind!r}, but {reason:.300} came up while reading it. Save the "
                "result again."
            ) from error


class HeadMaps(Result):
    """A result with maps over layers and heads: all of them are read alike.

    Attributes:
        labelled: The field that names the first axis of the maps; None for a single map.
        aligned: Fields with an entry for each of these names, which no annotation tells.
    """

    labelled: ClassVar[str | None] = None
    aligned: ClassVar[tuple[str, ...]] = ()

    @property
    def _axis(self) -> str:
        """What a name of the first axis is: a relation, a function, a score."""
        return next(name for name, source in self.json_axes.items() if source == self.labelled)

    def index_of(self, label: str | None = None) -> int:
        """Position of a name on the first axis; None means the only one."""
        names: tuple[str, ...] = getattr(self, str(self.labelled))
        if label is None and len(names) > 1:
            raise UsageError(f"This result holds {len(names)} {self.labelled}; name one of {', '.join(names)}.")
        if label is not None and label not in names:
            raise UsageError(f"This result has no {self._axis} {label!r}; it has {', '.join(names)}.")
        return 0 if label is None else names.index(label)

    def head_map(self, label: str | None = None) -> Float[Tensor, "layer head"]:
        """The map that :meth:`top` ranks; where there are several, that of one name."""
        values: Tensor = getattr(self, "values")  # noqa: B009
        return values if self.labelled is None else values[self.index_of(label)]

    def top(self, n: int = 5, label: str | None = None) -> list[tuple[Any, float]]:
        """The ``n`` heads with the largest values (ties: lower layer, then lower head)."""
        return largest_heads(self.head_map(label), n)

    def select(
        self,
        labels: str | Sequence[str] | None = None,
        heads: HeadLike | Iterable[HeadLike] | None = None,
        *,
        layers: LayerLike | Iterable[LayerLike] | None = None,
    ) -> "Self":
        """The same result for some names of the first axis, or with all but some heads left out (NaN).

        Args:
            labels: One name or several; all by default.
            heads: Only these heads (``"L12"``: all of layer 12).
            layers: Only heads of these layers.
        """
        if labels is not None and (self.labelled is None or not labels):
            raise UsageError(
                "This result has one map. Choose heads= or layers= of it."
                if self.labelled is None
                else f"No {self._axis} was named; this result has {', '.join(getattr(self, self.labelled))}."
            )
        names = [labels] if isinstance(labels, str) else labels
        numbers = None if names is None else [self.index_of(name) for name in names]
        left_out = None if heads is None and layers is None else ~self._chosen(heads, layers)
        changes: dict[str, Any] = {}
        for entry in _fields(type(self)):
            axes = _axes_of(self, entry.name)

            def chosen(value: Any, axes: list[str] = axes) -> Any:
                if isinstance(value, Mapping):
                    return {name: chosen(part) for name, part in value.items()}
                if isinstance(value, tuple):
                    return value if numbers is None else tuple(value[number] for number in numbers)
                for place, axis in enumerate(axes):
                    if numbers is not None and axis == self._axis:
                        value = value.index_select(place, torch.tensor(numbers))
                masked = left_out is not None and axes[-2:] == ["layer", "head"] and value.is_floating_point()
                return value.masked_fill(left_out, math.nan) if masked else value

            if axes or entry.name in (self.labelled, *self.aligned):
                value = getattr(self, entry.name)
                changes[entry.name] = None if value is None else chosen(value)
        whole: Any = self
        selected: Self = replace(whole, **changes)
        return selected

    def _chosen(self, heads: Any, layers: Any) -> Bool[Tensor, "layer head"]:
        n_layers, n_heads = len(self.axes["layer"]), len(self.axes["head"])
        every = [HeadIndex(layer, head) for layer in range(n_layers) for head in range(n_heads)]
        named = every if heads is None else [head.check(n_layers, n_heads) for head in head_list(heads, every)]
        numbers = range(n_layers) if layers is None else layer_list(layers)
        for number in numbers:
            HeadIndex(number, 0).check(n_layers, n_heads)
        mask = torch.zeros(n_layers, n_heads, dtype=torch.bool)
        for head in named:
            mask[head.layer, head.head] = head.layer in numbers
        return mask


def _axes_of(result: Result, name: str) -> list[str]:
    """Names of the axes of a field, or of the arrays in it; none for what is no array."""
    hint = annotations_of(type(result))[name]
    while (arguments := typing.get_args(hint)) and not hasattr(hint, "dim_str"):
        if typing.get_origin(hint) is tuple:
            return []
        hint = arguments[1] if typing.get_origin(hint) in (dict, Mapping) else arguments[0]
    axes = str(getattr(hint, "dim_str", "")).split()
    return list(result.json_axes) if axes == ["*cells"] else axes


def _newer_version(values: Any) -> str | None:
    """The version of this package that wrote a file, if it is newer than this one."""
    try:
        theirs = str(values["provenance"]["versions"]["tl-headmaps"])
        ours = package_versions()["tl-headmaps"]
        numbers = [tuple(int(part) for part in version.split(".")[:3]) for version in (theirs, ours)]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return theirs if numbers[0] > numbers[1] else None


def _from_newer(path: Path, version: str, what: str) -> OutputError:
    return OutputError(
        f"{path} was saved by tl-headmaps {version:.20}, which is newer than this one "
        f"({package_versions()['tl-headmaps']}) and does not know {what}. Update it: pip install --upgrade tl-headmaps."
    )


def _writes_own_form(result_class: type[Result]) -> bool:
    return any("to_dict" in vars(parent) for parent in result_class.__mro__ if parent is not Result)


def _holds_own_form(result: Result) -> bool:
    """Whether a result, or one inside it, writes a form of its own."""
    parts = (getattr(result, entry.name) for entry in _fields(type(result)))
    return _writes_own_form(type(result)) or any(_holds_own_form(part) for part in parts if isinstance(part, Result))


def _unknown_fields(result_class: type[Result], values: Any) -> list[str]:
    """Names in a file that this version of the class does not write; none where the class writes its own form."""
    if _writes_own_form(result_class):
        return []
    known = {"kind", "axes", *result_class.json_extra, *(entry.name for entry in _fields(result_class))}
    return sorted(str(name) for name in values if name not in known)


def _checked(result: _Any_Result, values: Mapping[str, Any]) -> _Any_Result:
    """The result itself; raises unless its fields have their types and belong together.

    Arrays that share an axis have the same length along it, and labels are as many. What no annotation says shows when
    the result is printed and its rows are listed.
    """
    sizes: dict[str, int] = {}
    own_form = _writes_own_form(type(result))
    axes = result.axes
    if values.get("axes", axes) != axes:
        raise MisfitError("axes that are not those of its arrays")
    for name, source in result.json_axes.items():
        if source is not None:
            sizes[name] = len(axes[name])
    for entry in _fields(type(result)):
        value, hint = getattr(result, entry.name), annotations_of(type(result))[entry.name]
        if isinstance(value, Result):
            _checked(value, values[entry.name])
            continue
        require_fit(value, hint, entry.name, sizes, nullable=own_form or entry.name in result.nullable)
    # A number beyond all floats (1e400) is read as infinity, which no file can hold again.
    json.dumps(result.provenance.to_dict(), allow_nan=False)
    str(result)
    for _ in result.to_rows():
        pass
    return result


def kinds() -> dict[str, type[Result]]:
    """Every public result class by its kind."""
    package = sys.modules[__name__.rpartition(".")[0]]
    public = (getattr(package, name) for name in package.__all__)
    return {
        value.kind: value
        for value in public
        if isinstance(value, type) and issubclass(value, Result) and value is not Result
    }


def cells(axes: Mapping[str, Sequence[Any]], values: Tensor) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """Every cell of an array that is not NaN: its index, and its labels by the name of their axis."""
    for index in itertools.product(*(range(n) for n in values.shape)):
        if not math.isnan(values[index]):
            yield index, {name: labels[at] for (name, labels), at in zip(axes.items(), index, strict=True)}


def largest_cells(
    axes: Mapping[str, Sequence[Any]], values: Any, n: int, kind: str
) -> list[tuple[tuple[Any, ...], float]]:
    """The ``n`` largest cells of an array with their labels, NaN left out; ties go to the first."""
    if not isinstance(values, Tensor) or list(values.shape) != [len(labels) for labels in axes.values()]:
        raise UsageError(f"A {kind.replace('_', ' ')} has no values that could be ranked. Print it, or see to_rows().")
    found = [(tuple(labels.values()), float(values[at])) for at, labels in cells(axes, values)]
    return sorted(found, key=lambda cell: -cell[1])[:n]


def largest_heads(values: Tensor, n: int) -> list[tuple[HeadIndex, float]]:
    """The ``n`` largest cells of a map over layers and heads, NaN left out; ties go to the lower layer, then head."""
    flat, width = values.flatten(), values.shape[1]
    order = flat.nan_to_num(nan=-math.inf).argsort(descending=True, stable=True)[:n].tolist()
    return [(HeadIndex(i // width, i % width), float(flat[i])) for i in order if not math.isnan(flat[i])]


def _fields(result_class: Any) -> tuple[Any, ...]:
    return fields(result_class)


def _size(result: Result, axis: str) -> int:
    """Length of an axis: that of the first array whose annotation names it."""
    for entry in _fields(type(result)):
        axes = getattr(annotations_of(type(result))[entry.name], "dim_str", "").split()
        if axis in axes:
            return int(getattr(result, entry.name).shape[axes.index(axis)])
    raise AssertionError(f"no array of {type(result).__name__} has the axis {axis!r}")


def _plain(value: Any, nullable: bool = False) -> Any:
    """A field as JSON has it: arrays and tuples as lists, heads by their names, NaN as null where it may be."""
    if isinstance(value, Tensor):
        return _plain(value.tolist(), nullable)
    if isinstance(value, float):
        return None if nullable and math.isnan(value) else value
    if isinstance(value, HeadIndex):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(entry, nullable) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, nullable) for entry in value]
    if isinstance(value, Result):
        return value.to_dict()
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name), nullable) for entry in fields(value)}
    return value


def _typed(value: Any, hint: Any) -> Any:
    """Inverse of :func:`_plain`, by the annotation of the field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = next(argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _typed(value, inner)
    if hasattr(hint, "array_type"):
        return tensor_of(value, _dtype(hint))
    if origin is tuple:
        repeated = arguments[1:] == (Ellipsis,)
        kinds = itertools.repeat(arguments[0]) if repeated else iter(arguments)
        return tuple(_typed(entry, kind) for entry, kind in zip(value, kinds, strict=not repeated))
    if origin in (dict, Mapping):
        return {name: _typed(entry, arguments[1]) for name, entry in value.items()}
    if hint is HeadIndex:
        return HeadIndex.parse(value)
    if hint is Provenance:
        return Provenance.from_dict(value)
    if isinstance(hint, type) and issubclass(hint, Result):
        return hint.from_dict(value)
    if isinstance(hint, type) and is_dataclass(hint):
        return hint(
            **{entry.name: _typed(value[entry.name], annotations_of(hint)[entry.name]) for entry in fields(hint)}
        )
    return (math.nan if value is None else float(value)) if hint is float else value


def _dtype(hint: Any) -> torch.dtype:
    """``Int`` arrays are int64, ``Bool`` bool, ``Float64`` float64 and all other ``Float`` arrays float32."""
    names = hint.dtypes
    return next(
        (getattr(torch, name) for name in ("float32", "float64", "int64", "bool") if name in names), torch.float32
    )


def nested(values: Tensor) -> Any:
    """Nested lists with None for NaN."""
    return _plain(values, nullable=True)


def tensor_of(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of :func:`nested`."""

    def filled(part: Any) -> Any:
        return [filled(entry) for entry in part] if isinstance(part, list) else math.nan if part is None else part

    return torch.tensor(filled(values), dtype=dtype)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and bool(((one == other) | _both_nan(one, other)).all())
        )
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if is_dataclass(one) and type(one) is type(other):
        return all(_equal(getattr(one, entry.name), getattr(other, entry.name)) for entry in fields(one))
    return bool(one == other)


def _both_nan(one: Tensor, other: Tensor) -> Tensor:
    return (one != one) & (other != other)


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
