"""What attention does to the value vectors of a text: of one head in all detail, of all heads as a map.

With a head, :func:`value_mixing` gives every association of a query with a key before and after attention; without one,
the map of what every head does to one association.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, Union, overload

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.running.activations import LayerActivations, hook_name, run_or_read
from ..capture.running.text import EncodedText
from ..capture.tensors import arrays_digest, given_tensor
from ..capture.weights import HeadWeights
from ..core.errors import UnsupportedModelError, UsageError
from ..core.options import public
from ..core.provenance import Provenance
from ..core.types import HeadIndex, HeadLike, Measure, Model, check_choice
from ..core.vocabulary import TokenLike, token_position, word_place
from ..renderers.figure import Figure
from ..renderers.formulas import DIGITS, MOST_DIGITS
from ..renderers.grids import MapLayer
from ..renderers.heat import head_map, token_grid
from ..renderers.text import number, signed, significant, table_text, visible, word
from ..results import HeadMaps, Result, cells, largest_cells
from ..results.table import frozen_result
from ..scorers.mixing import (
    cosines,
    dots,
    mixed,
    shared_dimensions,
    shared_when_turned,
    split_after,
    split_change,
)
from .worked_example import LEAST, MAX_ATTENTION, WorkedExample

if TYPE_CHECKING:
    from typing import Self

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest accepted difference between A V and hook_z, relative to the largest entry of z (or to 1)."""

_TURNS = 200
"""Turned bases in which shared dimensions are counted."""

_ROW_SUM_TOLERANCE = 1e-3
_ROUNDED_TOLERANCE = 1e-2
"""How far from 1 the sum of a row may be: of an array, and of a model, whose softmax may be rounded to bfloat16."""

_MOST_COLUMNS = 12
_MOST_SPLITS = 1_000_000
"""Numbers of query x key x source up to which JSON lists every split."""


Other: TypeAlias = Union[TokenLike, tuple["ValueMixing", TokenLike]]  # noqa: UP007 (a name in quotes has no |)
"""A token of the same text, or of another one."""


@frozen_result
class ValueMixing(Result):
    """Values V, attention A, mixed values A V, and the association of every query with every key before and after.

    Attributes:
        tokens: Tokens of the text.
        queries: Indices of the query tokens: the rows of ``pattern``, ``V_hat`` and the associations.
        value_vectors: V, one row per token, after a norm or clipping of values where the model has one.
        pattern: A, one row per query, as it was used (after normalising, if any).
        row_sums: Sums of the rows of A before normalising.
        normalised: Whether rows were divided by their sums.
        head: The head; None for plain arrays.
        reconstruction_error: Largest difference between A V and the model's own ``hook_z``, None without a model.
        key: The key that :attr:`example` compares the one query with, if there is one.
        attention: A of all tokens where ``pattern`` is that of one query; only of texts short enough to be drawn.

    Example:
        >>> from tl_headmaps import ValueMixing
        >>> A = [[1, 0, 0], [0.1, 0.9, 0], [0.6, 0.1, 0.4]]
        >>> V = [[0.1, 0.2, 0.3], [-0.8, 0.3, -0.1], [0.5, -0.1, -0.4]]
        >>> mixing = ValueMixing.from_arrays(A, V, ["Birds", "sometimes", "walk"])
        >>> round(float(mixing.before_dot[2, 0]), 3), round(float(mixing.after_dot[2, 0]), 3)
        (-0.09, 0.043)
        >>> [round(part, 3) for part in mixing.split("walk", "Birds").tolist()]  # adds up to the latter
        [0.084, -0.005, -0.036]
    """

    kind: ClassVar[str] = "value_mixing"
    methods: ClassVar[tuple[str, ...]] = ("elhage2021framework",)
    json_axes: ClassVar[dict[str, str | None]] = {"token": "tokens", "query": "queries"}
    tokens: tuple[str, ...]
    queries: tuple[int, ...]
    value_vectors: Float[Tensor, "key d_head"]
    pattern: Float[Tensor, "query key"]
    row_sums: Float[Tensor, " query"]
    normalised: bool
    head: HeadIndex | None
    reconstruction_error: float | None
    provenance: Provenance
    key: int | None = None
    attention: Float[Tensor, "token key"] | None = None

    @classmethod
    def from_arrays(cls, A: Any, V: Any, tokens: Sequence[str] | None = None, *, normalise: bool = False) -> "Self":
        """Mixing in plain arrays: attention A (query x key) and values V (token x dimension).

        Args:
            A: Attention. Rows that do not sum to one, or have negative entries, are reported and used as they are.
            V: Values, one row per token.
            tokens: Texts of the tokens; numbers from 1 by default, as in ``v1``.
            normalise: Divide each row of A by its sum.

        Example:
            >>> from tl_headmaps import ValueMixing
            >>> A = [[1, 0, 0], [0.1, 0.9, 0], [0.6, 0.1, 0.4]]
            >>> V = [[0.1, 0.2, 0.3], [-0.8, 0.3, -0.1], [0.5, -0.1, -0.4]]
            >>> mixing = ValueMixing.from_arrays(A, V, ["Birds", "sometimes", "walk"])
            >>> [round(value, 3) for value in mixing.V_hat[2].tolist()]
            [0.18, 0.11, 0.01]
            >>> mixing.notes
            ("row 3 of A ('walk') sums to 1.1, not to 1, and is used as it is",)
        """
        pattern = given_tensor(A, "A", "a square matrix, query x key").double()
        values = given_tensor(V, "V", "a matrix, token x dimension").double()
        if pattern.ndim != 2 or pattern.shape[0] != pattern.shape[1] or not len(pattern):
            raise UsageError(f"A has shape {tuple(pattern.shape)}; it must be a square matrix, query x key.")
        if values.ndim != 2 or len(values) != len(pattern) or not values.shape[1]:
            raise UsageError(
                f"V has shape {tuple(values.shape)}; with A of {len(pattern)} tokens it must have {len(pattern)} rows, "
                "one value vector for each token."
            )
        for name, array in (("A", pattern), ("V", values)):
            if not bool(array.isfinite().all()):
                raise UsageError(f"{name} holds NaN or infinity; every entry must be a finite number.")
        names = tuple(str(token) for token in (range(1, len(pattern) + 1) if tokens is None else tokens))
        if len(names) != len(pattern):
            raise UsageError(f"There are {len(names)} tokens, but A is {len(pattern)} x {len(pattern)}.")
        sums = pattern.sum(1)
        digest = arrays_digest(pattern, values)
        if normalise:
            empty = (sums <= 0).nonzero().flatten().tolist()
            if empty:
                raise UsageError(
                    f"Row {empty[0] + 1} of A sums to {float(sums[empty[0]]):g} and cannot be normalised; "
                    "give rows with a positive sum, or leave normalise out."
                )
            # Rows that sum to one but for rounding stay as they are.
            pattern = torch.where((sums - 1).abs()[:, None] > _ROW_SUM_TOLERANCE, pattern / sums[:, None], pattern)
        return cls(
            tokens=names,
            queries=tuple(range(len(pattern))),
            value_vectors=values,
            pattern=pattern,
            row_sums=sums,
            normalised=normalise,
            head=None,
            reconstruction_error=None,
            provenance=Provenance.of_arrays(digest, pattern.dtype, options={"normalise": normalise}),
        )

    @property
    def V(self) -> Float[Tensor, "key d_head"]:
        """Values of the tokens."""
        return self.value_vectors

    @property
    def A(self) -> Float[Tensor, "query key"]:
        """Attention of the queries."""
        return self.pattern

    @cached_property
    def V_hat(self) -> Float[Tensor, "query d_head"]:
        """Values of the queries after attention, A V."""
        return mixed(self.pattern, self.value_vectors)

    @cached_property
    def before_dot(self) -> Float[Tensor, "query key"]:
        """``v_q . v_k``."""
        return dots(self.value_vectors[list(self.queries)], self.value_vectors)

    @cached_property
    def after_dot(self) -> Float[Tensor, "query key"]:
        """``v_hat_q . v_k``."""
        return dots(self.V_hat, self.value_vectors)

    @cached_property
    def before_cosine(self) -> Float[Tensor, "query key"]:
        """Cosine of ``v_q`` and ``v_k``."""
        return cosines(self.value_vectors[list(self.queries)], self.value_vectors)

    @cached_property
    def after_cosine(self) -> Float[Tensor, "query key"]:
        """Cosine of ``v_hat_q`` and ``v_k``."""
        return cosines(self.V_hat, self.value_vectors)

    @property
    def values(self) -> Float[Tensor, "query key"]:
        """Change of the dot products."""
        return self.after_dot - self.before_dot

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about rows of A, as sentences."""
        return tuple(note for place in range(len(self.queries)) for note in self._notes(place))

    @property
    def example(self) -> WorkedExample | None:
        """The worked example of the query and key, if both were chosen."""
        return None if self.key is None or len(self.queries) != 1 else self.explain(self.queries[0], self.key)

    def split(self, query: TokenLike, key: TokenLike) -> Float[Tensor, " key"]:
        """Part of each source token in the association after attention; the parts add up to it."""
        return split_after(self.pattern[self._row(query)], self.value_vectors, self._position(key))

    def change_split(self, query: TokenLike, key: TokenLike) -> Float[Tensor, " key"]:
        """Part of each source token in the change; the parts add up to it."""
        row = self._row(query)
        return split_change(self.pattern[row], self.value_vectors, self.queries[row], self._position(key))

    def explain(
        self, query: TokenLike, key: TokenLike, *, digits: int = DIGITS, least: float | int = LEAST
    ) -> WorkedExample:
        """One association worked out by hand: ``print()`` it, or use ``.markdown()``, ``.to_latex()``, ``.figure()``.

        Args:
            query: The token whose vector changes: its text, ``walk#2`` for the second of several, or an index
                (-1 is the last).
            key: The token it is compared with.
            digits: Significant digits of the numbers.
            least: Terms below this share of the largest of their sum are summed as ``n others``, where there are
                several; 0 writes out all.
        """
        if not 1 <= digits <= MOST_DIGITS:
            raise UsageError(f"digits={digits} cannot be written. Give 1 to {MOST_DIGITS} significant digits.")
        if not 0 <= least < 1:
            raise UsageError(f"least={least} is impossible; it must be at least 0 (write out all terms) and below 1.")
        row, place = self._row(query), self._position(key)
        return WorkedExample(
            tokens=self.tokens,
            query=self.queries[row],
            key=place,
            values=self.value_vectors,
            row=self.pattern[row],
            mixed=self.V_hat[row],
            before=float(self.before_dot[row, place]),
            after=float(self.after_dot[row, place]),
            cosine_before=float(self.before_cosine[row, place]),
            cosine_after=float(self.after_cosine[row, place]),
            split=self.split(query, key),
            change_split=self.change_split(query, key),
            attention=self.pattern if len(self.queries) == len(self.tokens) else self.attention,
            notes=self._notes(row),
            digits=digits,
            least=float(least),
        )

    def dimensions(
        self, query: TokenLike, key: TokenLike, *, against: Other, control: Other | Sequence[Other] = (), n: int = 8
    ) -> str:
        """How many of the dimensions that carry the association of ``query`` with ``key`` another word shares.

        The part of a dimension is the product of the mixed value and the key's value there. A head's dimensions are
        arbitrary: turn them, and the model computes the same. So the count of shared ones stands beside two numbers
        that do not depend on them, the mean count over turned bases and the cosine of the mixed values; and beside the
        same for control words, since words with the same key share dimensions anyway.

        Args:
            query: The word that is asked about.
            key: The word it is associated with.
            against: The word it is compared with: a token of this text, or ``(mixing, token)`` of another text in the
                same head, in which it is associated with the same key.
            control: A word that has nothing to do with either, likewise, or a list of them.
            n: How many of the strongest dimensions are compared.

        Example:
            >>> from tl_headmaps import load_default_model, value_mixing
            >>> text = "But birds walk, and birds are good at flying, not at math"
            >>> mixing = value_mixing(load_default_model(), text, "L13H8")
            >>> print(mixing.dimensions("walk", "birds#1", against="flying", control="math"))
            'walk' and 'flying' share 6 of their 8 strongest dimensions ...
        """
        width = self.value_vectors.shape[1]
        if not 1 <= n <= width:
            raise UsageError(f"n={n} dimensions cannot be compared: the values have {width}. Give 1 to {width}.")
        place = self._position(key)
        one = isinstance(control, str | int) or (len(control) == 2 and isinstance(control[0], ValueMixing))
        controls: Any = [control] if one else control
        names, vectors, keys = zip(*(self._other(other, place) for other in (query, against, *controls)), strict=True)
        mixed_values, values = torch.stack(vectors), torch.stack(keys)
        shared = shared_dimensions(mixed_values * values, n).tolist()
        turned = shared_when_turned(mixed_values, values, n, _TURNS).double().mean(0).tolist()
        cosine = cosines(mixed_values, mixed_values)[0].tolist()
        asked, *others = map(repr, names)
        counts = [
            f"{asked} and {'the control ' * (place > 1)}{other} share {shared[place]} of their {n} strongest "
            f"dimensions (in rotated bases {number(turned[place], 1)} on average; cosine {number(cosine[place])})"
            for place, other in enumerate(others, 1)
        ]
        verdict = "Without a control word this says little: words with the same key share dimensions anyway."
        if controls:
            more = shared[1] - max(shared[2:])
            than = f"{more} more than any" if more > 0 else "no more of them than a"
            verdict = f"So {others[0]} shares {than} control word does."
        return (
            f"{'; '.join(counts)}; two random choices would share {number(n**2 / width, 1)}. {verdict} Dimensions of a "
            "head are arbitrary up to rotation; cosine and the mean over rotated bases do not depend on the choice."
        )

    def _other(self, other: Other, key: int) -> tuple[str, Tensor, Tensor]:
        """A word, its mixed value, and the value of the key in its text."""
        if not isinstance(other, tuple):
            row = self._row(other)
            return word(self.tokens[self.queries[row]]), self.V_hat[row], self.value_vectors[key]
        mixing, token = other
        same_model = mixing.provenance.fingerprint == self.provenance.fingerprint or self.head is None
        if mixing.head != self.head or not same_model or mixing.value_vectors.shape[1] != self.value_vectors.shape[1]:
            raise UsageError(
                f"{token!r} is of {mixing.head} of {mixing.provenance.model!r}, and dimensions of different heads have "
                f"nothing in common. Give a mixing of {self.head} of {self.provenance.model!r}."
            )
        _, place = word_place(mixing.tokens, word(self.tokens[key]))
        return mixing._other(token, place)

    def _position(self, token: TokenLike) -> int:
        return token_position(self.tokens, token)

    def _row(self, query: TokenLike) -> int:
        place = self._position(query)
        if place not in self.queries:
            listed = ", ".join(f"{token} {self.tokens[token]!r}" for token in self.queries)
            raise UsageError(
                f"This result holds the query {listed} and not {place} {self.tokens[place]!r}. "
                "Call value_mixing() without query to get them all."
            )
        return self.queries.index(place)

    def _notes(self, row: int) -> tuple[str, ...]:
        name = f"row {self.queries[row] + 1} of A ({self.tokens[self.queries[row]].strip()!r})"
        total = float(self.row_sums[row])
        notes = []
        if abs(total - 1) > (_ROW_SUM_TOLERANCE if self.head is None else _ROUNDED_TOLERANCE):
            fate = "and was divided by its sum" if self.normalised else "not to 1, and is used as it is"
            notes.append(f"{name} sums to {total:.6g}, {fate}")
        if bool((self.pattern[row] < 0).any()):
            notes.append(f"{name} has negative weights, which a softmax never gives; it is used as it is")
        return tuple(notes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``split`` is null if it would exceed a million numbers."""
        n = len(self.tokens)
        every = range(len(self.queries)) if len(self.queries) * n * n <= _MOST_SPLITS else None
        return {
            "kind": self.kind,
            "head": None if self.head is None else str(self.head),
            "axes": self.axes,
            "key": self.key,
            "V": self.value_vectors.tolist(),
            "A": self.pattern.tolist(),
            **({} if self.attention is None else {"attention": self.attention.tolist()}),
            "V_hat": self.V_hat.tolist(),
            "before": {"dot": self.before_dot.tolist(), "cosine": self.before_cosine.tolist()},
            "after": {"dot": self.after_dot.tolist(), "cosine": self.after_cosine.tolist()},
            "split": None if every is None else [[self._split(row, key) for key in range(n)] for row in every],
            "row_sums": self.row_sums.tolist(),
            "normalised": self.normalised,
            "notes": list(self.notes),
            "reconstruction_error": self.reconstruction_error,
            "dtype": str(self.value_vectors.dtype).removeprefix("torch."),
            "provenance": self.provenance.to_dict(),
        }

    def _split(self, row: int, key: int) -> list[float]:
        parts: list[float] = split_after(self.pattern[row], self.value_vectors, key).tolist()
        return parts

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        dtype = {"float32": torch.float32, "float64": torch.float64}[values["dtype"]]
        return cls(
            tokens=tuple(values["axes"]["token"]),
            queries=tuple(values["axes"]["query"]),
            value_vectors=torch.tensor(values["V"], dtype=dtype),
            pattern=torch.tensor(values["A"], dtype=dtype),
            row_sums=torch.tensor(values["row_sums"], dtype=dtype),
            normalised=values["normalised"],
            head=None if values["head"] is None else HeadIndex.parse(values["head"]),
            reconstruction_error=values["reconstruction_error"],
            key=values["key"],
            attention=torch.tensor(values["attention"], dtype=dtype) if "attention" in values else None,
            provenance=Provenance.from_dict(values["provenance"]),
        )

    def top(self, n: int = 5) -> list[tuple[Any, float]]:
        """The ``n`` pairs (query, key) whose dot product attention raises most, by their positions in the text."""
        return largest_cells({"query": self.queries, "key": range(len(self.tokens))}, self.values, n, self.kind)

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per query and key."""
        for at, labels in cells({"query": self.queries, "key": range(len(self.tokens))}, self.pattern):
            query, key = labels["query"], labels["key"]
            yield {
                "query": query,
                "query_token": self.tokens[query],
                "key": key,
                "key_token": self.tokens[key],
                "attention": float(self.pattern[at]),
                "dot_before": float(self.before_dot[at]),
                "dot_after": float(self.after_dot[at]),
                "cosine_before": float(self.before_cosine[at]),
                "cosine_after": float(self.after_cosine[at]),
            }

    def figure(self) -> Figure:
        """The worked example, if a query and a key were chosen; else the change of every pair's dot product."""
        if self.example is not None:
            return self.example.figure()
        where = "" if self.head is None else f" of {self.head}"
        return token_grid(
            self.after_dot - self.before_dot,
            [self.tokens[query] for query in self.queries],
            self.tokens,
            title=f"Change of association by attention{where}",
            unit="dot product after minus before",
            rows="query",
            columns="key",
            signed=True,
            details={"before": self.before_dot, "after": self.after_dot},
            note=self._noted(" ".join(self.notes), " "),
        )

    def __str__(self) -> str:
        whose = "given arrays" if self.head is None else str(self.head)
        title = f"Value mixing of {whose}: dot product (cosine) with each token's value, before -> after"
        parts = [title, self._square() if len(self.tokens) <= _MOST_COLUMNS else self._strongest()]
        if self.reconstruction_error is not None:
            product = "A V times the gate" if self.provenance.notes else "A V"
            parts.append(f"{product} differs from the model's own output by at most {self.reconstruction_error:.1e}")
        if self.example is not None:
            # Its last lines are the notes.
            parts.append(str(self.example))
        else:
            parts += [f"note: {note}" for note in self.notes]
        return self._noted("\n\n".join(parts))

    def _square(self) -> str:
        """Every association before and after."""
        rows = []
        for row, query in enumerate(self.queries):
            dots = zip(self.before_dot[row].tolist(), self.after_dot[row].tolist(), strict=True)
            angles = zip(self.before_cosine[row].tolist(), self.after_cosine[row].tolist(), strict=True)
            cells = [
                f"{significant(dot)} → {significant(new_dot)} ({significant(cosine)} → {significant(new_cosine)})"
                for (dot, new_dot), (cosine, new_cosine) in zip(dots, angles, strict=True)
            ]
            rows.append([self.tokens[query], *cells])
        return table_text([("", "left"), *((visible(token), "right") for token in self.tokens)], rows)

    def _strongest(self, most: int = 3) -> str:
        """The associations of each query that change most."""
        rows = []
        arrays = (self.before_dot, self.after_dot, self.before_cosine, self.after_cosine)
        for row, query in enumerate(self.queries[: 5 * _MOST_COLUMNS]):
            for key in self.values[row].abs().argsort(descending=True, stable=True)[:most].tolist():
                numbers = [significant(float(array[row, key])) for array in arrays]
                rows.append([f"{query} {self.tokens[query]}", f"{key} {self.tokens[key]}", *numbers])
        titles = ["query", "key", "dot before", "after", "cosine before", "after"]
        columns = [(title, "left" if title in ("query", "key") else "right") for title in titles]
        return table_text(columns, rows)


_MAPS = ("before_dot", "after_dot", "others_dot", "before_cosine", "after_cosine", "others_cosine", "attention")
"""Fields with one value per layer and head."""


@frozen_result
class AssociationHeads(HeadMaps):
    """Head maps of the association of a query with a key, before and after each head's attention.

    Attributes:
        tokens: Tokens of the text.
        query, key: Indices of the two tokens.
        measure: Which measure :attr:`values` and :meth:`top` use.
        before_dot, after_dot: ``v_q . v_k`` and ``v_hat_q . v_k`` in each head's value space.
        before_cosine, after_cosine: The same as cosines.
        others_dot, others_cosine: The null: mean gain of the query with the other tokens it can see (not itself,
            not the key); NaN where there is none.
        attention: Attention of the query to the key.

    Example:
        >>> from tl_headmaps import association_heads, load_default_model
        >>> heads = association_heads(load_default_model(), "Birds sometimes walk", "walk", "sometimes")
        >>> heads.tokens[heads.query], heads.tokens[heads.key], heads.measure
        (' walk', ' sometimes', 'cosine')
        >>> round(float(heads.attention[16, 0]), 2), round(float(heads.specific("cosine")[16, 0]), 2)
        (0.84, 0.5)
    """

    kind: ClassVar[str] = "association_heads"
    methods: ClassVar[tuple[str, ...]] = ("elhage2021framework",)
    json_axes: ClassVar[dict[str, str | None]] = {"layer": None, "head": None, "token": "tokens"}
    json_extra: ClassVar[tuple[str, ...]] = ("notes",)
    nullable: ClassVar[tuple[str, ...]] = _MAPS
    tokens: tuple[str, ...]
    query: int
    key: int
    measure: Measure
    before_dot: Float[Tensor, "layer head"]
    after_dot: Float[Tensor, "layer head"]
    others_dot: Float[Tensor, "layer head"]
    before_cosine: Float[Tensor, "layer head"]
    after_cosine: Float[Tensor, "layer head"]
    others_cosine: Float[Tensor, "layer head"]
    attention: Float[Tensor, "layer head"]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "layer head"]:
        """The gain: association after minus before."""
        return self.gain(self.measure)

    def gain(self, measure: Measure) -> Float[Tensor, "layer head"]:
        """The gain in one measure."""
        check_choice(measure, Measure, "measure")
        after: Tensor = getattr(self, f"after_{measure}")
        before: Tensor = getattr(self, f"before_{measure}")
        return after - before

    def specific(self, measure: Measure) -> Float[Tensor, "layer head"]:
        """The gain above the mean gain with the other tokens."""
        gain, others = self.gain(measure), getattr(self, f"others_{measure}")
        specific: Tensor = gain - others.nan_to_num(nan=0.0)
        return specific

    @property
    def notes(self) -> tuple[str, ...]:
        """What to keep in mind when reading the map, as sentences."""
        notes = []
        if self.key > self.query:
            notes.append("the key comes after the query, which a causal head cannot see")
        if self.key == 0:
            notes.append(
                "the key is the first token, where many heads park their attention regardless of its meaning; "
                "put a word or BOS in front of it (prepend_bos) for a map that says more"
            )
        return tuple(notes)

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head."""
        axes = {name: self.axes[name] for name in ("layer", "head")}
        for at, labels in cells(axes, self.attention):
            yield {**labels, **{name: float(getattr(self, name)[at]) for name in _MAPS}}

    def figure(self) -> Figure:
        """Gain in cosine and in dot product, and the attention behind it."""
        query, key = self.tokens[self.query].strip(), self.tokens[self.key].strip()
        gains = {
            "cosine": (self.gain("cosine"), self.before_cosine, self.after_cosine),
            "dot product": (self.gain("dot"), self.before_dot, self.after_dot),
        }
        layers = [
            MapLayer(f"gain in {name}", gain, details={"before": before, "after": after}, unit=f"gain in {name}")
            for name, (gain, before, after) in gains.items()
        ]
        if self.measure == "dot":
            layers.reverse()
        layers.append(MapLayer("attention", self.attention, unit="attention"))
        return head_map(
            layers,
            title=f"Heads that bring '{query}' and '{key}' together",
            unit="gain",
            switches=("measure", "map"),
            empty=self.provenance.short_rows,
            note=" ".join(self.notes),
        )

    def __str__(self) -> str:
        query, key = (word(self.tokens[token]) for token in (self.query, self.key))
        rows = []
        for head, gain in self.top(10):
            at = (head.layer, head.head)
            before, after, others = (
                getattr(self, f"{when}_{self.measure}")[at] for when in ("before", "after", "others")
            )
            shown = [significant(float(number)) for number in (self.attention[at], before, after)]
            rows.append([str(head), *shown, signed(gain), significant(float(others))])
        titles = ["attention", "before", "after", "gain", "others"]
        columns = [(f"best of {self.n_measured}", "left"), *((title, "right") for title in titles)]
        title = f"Heads that bring {query!r} closer to {key!r} ({self.measure} of value vectors)"
        note = (
            "gain: association after attention minus before; others: mean gain with the other tokens the query can see"
        )
        return "\n\n".join([title, table_text(columns, rows), note, *(f"note: {text}" for text in self.notes)])


@overload
def value_mixing(
    model: Model,
    text: Any,
    head: HeadLike,
    query: TokenLike | None = ...,
    key: TokenLike | None = ...,
    *,
    prepend_bos: bool | None = ...,
    cache: Any = ...,
) -> ValueMixing: ...
@overload
def value_mixing(
    model: Model,
    text: Any,
    head: None = ...,
    query: TokenLike = ...,
    key: TokenLike = ...,
    *,
    measure: Measure | None = ...,
    prepend_bos: bool | None = ...,
    cache: Any = ...,
) -> AssociationHeads: ...
@public
def value_mixing(
    model: Model,
    text: Any,
    head: HeadLike | None = None,
    query: TokenLike | None = None,
    key: TokenLike | None = None,
    *,
    measure: Measure | None = None,
    prepend_bos: bool | None = None,
    cache: Any = None,
) -> ValueMixing | AssociationHeads:
    """Values, attention and mixed values of one head on a text, and every association before and after.

    Without a head: the map of all heads, of how much closer each of them brings ``query`` to ``key``.

    Args:
        head: ``"L5H3"``, ``(5, 3)`` or a HeadIndex; all heads by default, which needs a query and a key.
        query: Only this token as a query: its text, ``walk#2`` for the second of several, or an index
            (-1 is the last).
        key: With ``query``, the token it is compared with in the result's worked example.
        measure: What all heads are ranked by. Value vectors of different heads differ in length, so cosines (the
            default) are easier to compare between heads than dot products. The result holds both.

    Example:
        >>> from tl_headmaps import load_default_model, value_mixing
        >>> mixing = value_mixing(load_default_model(), "Birds sometimes walk", "L16H0", "walk", "sometimes")
        >>> [round(share, 2) for share in mixing.A[0].tolist()]  # what "walk" attends to, BOS first
        [0.11, 0.04, 0.84, 0.0]
        >>> round(mixing.example.cosine_before, 2), round(mixing.example.cosine_after, 2)
        (0.21, 1.0)
        >>> heads = value_mixing(load_default_model(), "Birds sometimes walk", query="walk", key="sometimes")
        >>> [(str(head), round(gain, 2)) for head, gain in heads.top(2)]
        [('L16H0', 0.79), ('L0H3', 0.78)]
    """
    if head is None:
        if query is None or key is None:
            raise UsageError("Without a head, one association is mapped over all heads. Give a head, or query and key.")
        return _of_all_heads(model, text, query, key, measure or "cosine", prepend_bos, cache)
    if measure is not None:
        raise UsageError(f"measure={measure!r} ranks all heads, and one was given. Leave measure out, or the head.")
    return _of_head(model, text, head, query, key, prepend_bos, cache)


@public
def association_heads(
    model: Model,
    text: Any,
    query: TokenLike,
    key: TokenLike,
    *,
    measure: Measure = "cosine",
    prepend_bos: bool | None = None,
    cache: Any = None,
) -> AssociationHeads:
    """:func:`value_mixing` of all heads: the gain of each, association of ``query`` with ``key`` after minus before.

    Args:
        query: The token whose vector changes: its text, ``walk#2`` for the second of several, or an index
            (-1 is the last).
        key: The token it is compared with.
        measure: What heads are ranked by; the result holds both measures.

    Example:
        >>> from tl_headmaps import association_heads, load_default_model
        >>> heads = association_heads(load_default_model(), "Birds sometimes walk", "walk", "sometimes")
        >>> [(str(head), round(gain, 2)) for head, gain in heads.top(2)]
        [('L16H0', 0.79), ('L0H3', 0.78)]
    """
    return value_mixing(model, text, None, query, key, measure=measure, prepend_bos=prepend_bos, cache=cache)


def _of_all_heads(
    model: Any, text: Any, query: TokenLike, key: TokenLike, measure: Measure, prepend_bos: bool | None, cache: Any
) -> AssociationHeads:
    prompt = EncodedText.of(model, text, prepend_bos=prepend_bos, least=2, what="an association needs two")
    q, k = token_position(prompt.tokens, query), token_position(prompt.tokens, key)
    if q == k:
        raise UsageError(f"Query and key are the same token, {q} {prompt.tokens[q]!r}. Choose two different ones.")
    weights = HeadWeights.of(model)
    weights.require_own_values("value vectors and their associations")
    weights.require_plain_mixing("Associations", up_to_values=True)
    maps = {name: torch.full((weights.n_layers, weights.n_heads), float("nan")) for name in _MAPS}
    others = [token for token in range(q) if token != k]

    def reduce(seen: LayerActivations) -> None:
        layer = weights.layer(seen.layer)
        groups = layer.mixed(_key_values(seen, layer.shape.n_kv_heads).float()).cpu()
        rows = seen["pattern"][0, :, q].to("cpu", torch.float32)
        for head, row in enumerate(rows):
            values = groups[layer.shape.group_of(head)]
            own, moved = values[q][None], mixed(row[None], values)
            for name, measured in (("dot", dots), ("cosine", cosines)):
                before, after = measured(own, values)[0], measured(moved, values)[0]
                maps[f"before_{name}"][seen.layer, head] = before[k]
                maps[f"after_{name}"][seen.layer, head] = after[k]
                maps[f"others_{name}"][seen.layer, head] = (after - before)[others].mean() if others else float("nan")
            maps["attention"][seen.layer, head] = row[k]

    run_or_read(model, prompt.ids, cache, read=("pattern", "v"), reduce=reduce)
    options = {
        "query": q,
        "key": k,
        "measure": measure,
        "prepend_bos": prompt.prepend_bos,
        "from_cache": cache is not None,
    }
    return AssociationHeads(
        tokens=prompt.tokens,
        query=q,
        key=k,
        measure=measure,
        provenance=weights.provenance(runs_model=True, options=options),
        **maps,
    )


def _of_head(
    model: Any,
    text: Any,
    head: HeadLike,
    query: TokenLike | None,
    key: TokenLike | None,
    prepend_bos: bool | None,
    cache: Any,
) -> ValueMixing:
    if key is not None and query is None:
        raise UsageError(f"key={key!r} was given without a query. Give the query that is compared with it, too.")
    prompt = EncodedText.of(model, text, prepend_bos=prepend_bos, least=1, what="at least one is needed")
    rows = list(range(len(prompt.ids))) if query is None else [token_position(prompt.tokens, query)]
    place = None if key is None else token_position(prompt.tokens, key)
    weights = HeadWeights.of(model)
    weights.require_own_values("value vectors and their associations")
    index = weights.head(head)
    layer = weights.layer(index.layer)
    # The picture of one query shows the whole matrix, where it can be read.
    whole = list(range(len(prompt.ids))) if query is not None and len(prompt.ids) <= MAX_ATTENTION else []
    kept: list[tuple[Tensor, ...]] = []

    def keep(seen: LayerActivations) -> None:
        values = layer.mixed(_key_values(seen, layer.shape.n_kv_heads)[layer.shape.group_of(index.head)].float())
        z = seen["z"][0, rows, index.head]
        gate = (
            seen["gate"][0, rows].unflatten(-1, (layer.shape.n_heads, -1))[:, index.head].sigmoid() if gated else z[:0]
        )
        parts = (seen["pattern"][0, index.head, rows], values, z, gate, seen["pattern"][0, index.head, whole])
        kept.append(tuple(part.to("cpu", torch.float32) for part in parts))

    # Other gates (AFMoE, Laguna) are not shown in this form; the difference below then refuses the head.
    gated: tuple[Literal["gate"], ...] = ("gate",) if hook_name(index.layer, "gate") in model.hook_dict else ()
    run_or_read(model, prompt.ids, cache, read=("pattern", "v", "z", *gated), layers=[index.layer], reduce=keep)
    ((pattern, values, z, gate, attention),) = kept
    mixed = pattern @ values
    error = float(((mixed * gate if gated else mixed) - z).abs().max())
    if error > _TOLERANCE[weights.W_E.dtype] * float(z.abs().max().clamp_min(1.0)):
        raise UnsupportedModelError(
            f"In {weights.model_name!r} the output of {index} is not its pattern times its values (they differ by "
            f"{error:.2g}), so its mixing cannot be explained this way. Choose a model with plain attention."
        )
    options = {
        "query": None if query is None else rows[0],
        "prepend_bos": prompt.prepend_bos,
        "from_cache": cache is not None,
    }
    return ValueMixing(
        tokens=prompt.tokens,
        queries=tuple(rows),
        value_vectors=values,
        pattern=pattern,
        row_sums=pattern.sum(1),
        normalised=False,
        head=index,
        reconstruction_error=error,
        provenance=weights.provenance(runs_model=True, options=options),
        key=place,
        attention=attention if whole else None,
    )


def _key_values(seen: LayerActivations, n_kv_heads: int) -> Tensor:
    """Values of the first prompt, key/value head x token x d_head."""
    values = seen["v"][0]
    return values.reshape(len(values), n_kv_heads, -1).transpose(0, 1)
