"""What one head does with a few chosen tokens: a window on its map, with exact ranks among the whole vocabulary."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.running.context import ContextVectors
from ..capture.running.last_position import Source
from ..capture.weights import HeadWeights
from ..circuits.extremes import entries
from ..circuits.maps import CircuitMaps, ContextSources
from ..circuits.ranking import ranks
from ..core.errors import TokenError, UsageError
from ..core.options import public
from ..core.provenance import Provenance
from ..core.types import Circuit, HeadIndex, HeadLike, Model, Preset
from ..core.vocabulary import TokenLike, near_words, single_id, token_string, word_ids
from ..data.relations import MultiToken, RelationLike, resolve
from ..renderers import heat
from ..renderers.figure import Figure
from ..renderers.text import in_words, number, table_text, visible
from ..results import Result, cells
from ..results.table import frozen_result
from .relation_scores import relation_scores


@frozen_result
class TokenGrid(Result):
    """Entries of a head's map and their ranks among all tokens.

    Attributes:
        head: The head.
        circuit: ``"ov"`` (rows attended-to tokens, columns written tokens) or ``"qk"`` (rows queries, columns keys).
        sources: Row labels, as given.
        targets: Column labels, as given.
        token_ids: Token id of each row (``"source"``) and of each column (``"target"``).
        values: Entries of the map.
        ranks: How many tokens of the whole row have a strictly greater entry (0 is best; text and figures count
            from 1).
        n_vocab: Number of tokens ranked against.
        relation: Name of the relation the grid is an example of, if one was given.
        score, score_k, score_pairs: The head's score on all its pairs, with k and the number of pairs.

    Example:
        >>> from tl_headmaps import load_default_model, token_grid
        >>> grid = token_grid(load_default_model(), "L23H4", ["France", "Egypt"], ["Paris", "Cairo"])
        >>> grid.ranks.diagonal().tolist(), grid.n_vocab
        ([8, 7], 49152)
        >>> list(grid.to_rows())[0]["target"]
        'Paris'
    """

    kind: ClassVar[str] = "token_grid"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps", "elhage2021framework")
    json_axes: ClassVar[Mapping[str, str | None]] = {"source": "sources", "target": "targets"}
    json_extra: ClassVar[tuple[str, ...]] = ("ranks_count_from",)
    ranks_count_from: ClassVar[int] = 0
    head: HeadIndex
    circuit: Circuit
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    token_ids: dict[str, tuple[int, ...]]
    n_vocab: int
    values: Float[Tensor, "source target"]
    ranks: Int[Tensor, "source target"]
    provenance: Provenance
    relation: str | None = None
    score: float | None = None
    score_k: int | None = None
    score_pairs: int | None = None

    @property
    def source_ids(self) -> tuple[int, ...]:
        """Token id of each row."""
        return self.token_ids["source"]

    @property
    def target_ids(self) -> tuple[int, ...]:
        """Token id of each column."""
        return self.token_ids["target"]

    def best(self) -> list[tuple[str, str]]:
        """Each source with its best-ranked target."""
        columns = self.values.argmax(1).tolist()
        return [(source, self.targets[j]) for source, j in zip(self.sources, columns, strict=True)]

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per cell."""
        for at, labels in cells(self.axes, self.values):
            yield {
                "head": str(self.head),
                "circuit": self.circuit,
                **labels,
                "value": float(self.values[at]),
                "rank": int(self.ranks[at]),
            }

    @property
    def _caption(self) -> str:
        does = "writes when it attends to" if self.circuit == "ov" else "attends to from"
        preset = self.provenance.options["preset"]
        return f"{self.head} {self.circuit.upper()} map, preset {preset}: what it {does} a row"

    @property
    def _scored(self) -> str:
        """Of how many pairs the score is the share."""
        among = "the strongest token" if self.score_k == 1 else f"among the {self.score_k} strongest tokens"
        return f"share of {self.score_pairs} pairs whose target is {among}"

    def figure(self) -> Figure:
        """A heat map of the values, with their ranks among the vocabulary."""
        best = ", ".join(f"{source} → {target}" for source, target in self.best()[:8])
        notes = [f"largest of each row: {best}" + (", …" if len(self.sources) > 8 else "")]
        if self.relation is not None:
            notes = [self._scored, self._caption, *notes]
        rows, columns = ("source", "target") if self.circuit == "ov" else ("query", "key")
        return heat.token_grid(
            self.values,
            self.sources,
            self.targets,
            title=self._caption if self.relation is None else in_words(self.relation),
            unit="entry of the map",
            score=self.score,
            rows=rows,
            columns=columns,
            details={f"rank among {self.n_vocab:,} tokens": self.ranks + 1},
            note=self._noted(" · ".join(notes), " · "),
        )

    def __str__(self) -> str:
        """Value and rank of each cell, the largest of each row marked."""
        rows = []
        for source, values, places, best in zip(
            self.sources, self.values.tolist(), self.ranks.tolist(), self.values.argmax(1).tolist(), strict=True
        ):
            texts = [f"{number(value)} #{rank + 1:,}" for value, rank in zip(values, places, strict=True)]
            texts[best] = f"*{texts[best]}"
            rows.append([source, *texts])
        columns = [("", "left"), *((visible(target), "right") for target in self.targets)]
        note = f"value #rank among {self.n_vocab:,} tokens (1 is best); * largest of the row"
        if self.relation is not None:
            note = f"{self.relation}: score {number(self.score)}, the {self._scored}\n{note}"
        return self._noted(f"{self._caption}\n\n{table_text(columns, rows)}\n\n{note}")


@public
def token_grid(
    model: Model | HeadWeights,
    head: HeadLike,
    sources: Sequence[TokenLike],
    targets: Sequence[TokenLike],
    *,
    relation: RelationLike | None = None,
    multi_token: MultiToken = "skip",
    circuit: Circuit = "ov",
    preset: Preset | None = None,
    prompts: str | Sequence[str] | None = None,
    vectors: ContextVectors | str | Path | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> TokenGrid:
    """Entries of one head's map for chosen tokens, with their exact ranks among the whole vocabulary.

    Args:
        model: A TransformerBridge, a HookedTransformer, or HeadWeights.
        sources: Row tokens: words (with a leading space, as in running text) or token ids.
        targets: Column tokens, likewise.
        relation: The relation the grid is an example of: its name becomes the title, and the head's score on all its
            pairs stands below the grid.
        multi_token: ``"skip"`` refuses a target of several tokens, ``"first"`` takes its first token.
        circuit: ``"ov"``: what the head writes when it attends to a source. ``"qk"``: how much a query (row)
            attends to a key (column).

    Example:
        >>> from tl_headmaps import load_default_model, token_grid
        >>> grid = token_grid(load_default_model(), "L23H4", ["France", "Egypt"], ["Paris", "Cairo"])
        >>> grid.best()
        [('France', 'Paris'), ('Egypt', 'Cairo')]
        >>> named = token_grid(
        ...     load_default_model(), "L23H4", ["France"], ["Paris"], relation="country_to_capital", progress=False
        ... )
        >>> named.relation, round(named.score, 2), named.score_pairs
        ('country_to_capital', 0.74, 42)
        >>> int(grid.ranks[0, 0])  # of 49,152 tokens, only eight are written more strongly than Paris
        8
    """
    example_of = None if relation is None else resolve(relation)
    weights = HeadWeights.of(model)
    preset = weights.preset(preset, circuit, in_context=prompts is not None or vectors is not None)
    index = weights.head(head)
    for name, words in (("sources", sources), ("targets", targets)):
        if isinstance(words, str) or not len(words):
            raise UsageError(f"{name} must be a list of at least one word or token id, not {words!r}.")
    # Sources in context may have several tokens: they are read at their last.
    ids = [_ids(weights, word, weights.n_vocab, several=preset == "context") for word in sources]
    context = ContextSources.of(
        weights, ids, circuit, preset, prompts=prompts, vectors=vectors, prepend_bos=prepend_bos, progress=progress
    )
    rows = torch.arange(len(ids), device=weights.device)
    source_ids = [source[-1] for source in ids]
    plain = None if context is not None else torch.tensor(source_ids, device=weights.device)
    circuits = CircuitMaps(weights, plain, circuit=circuit, preset=preset, context=context)
    firsts = multi_token == "first"
    target_ids = [
        single_id(None, _ids(weights, word, circuits.n_columns, several=firsts)[0], circuits.n_columns)
        for word in targets
    ]
    columns = torch.tensor(target_ids, device=weights.device)
    maps = circuits.layer(index.layer, [index.head])
    scored: dict[str, Any] = {}
    if example_of is not None:
        all_pairs = relation_scores(
            weights,
            example_of,
            preset=preset,
            circuit=circuit,
            heads=[index],
            multi_token=multi_token,
            prompts=prompts,
            vectors=vectors,
            prepend_bos=prepend_bos,
            progress=progress,
        )
        scored = {
            "relation": example_of.name,
            "score": float(all_pairs.promote[0, index.layer, index.head]),
            "score_k": all_pairs.k[0],
            "score_pairs": all_pairs.n_kept[0],
        }
    ranked = ranks(maps, rows.repeat_interleave(len(columns)), columns.repeat(len(rows)))
    return TokenGrid(
        head=index,
        circuit=circuit,
        sources=_labels(weights, sources),
        targets=_labels(weights, targets),
        token_ids={"source": tuple(source_ids), "target": tuple(target_ids)},
        n_vocab=circuits.n_columns,
        values=entries(maps, columns)[0].cpu(),
        ranks=ranked.greater[0].view(len(rows), len(columns)).cpu(),
        provenance=weights.provenance(
            options={"preset": preset} | ({} if context is None else context.options),
            data={} if context is None else context.data,
        ),
        **scored,
    )


def _ids(weights: HeadWeights, word: TokenLike, n_tokens: int, several: bool) -> Source:
    """The tokens of a word; one alone, unless it may have several."""
    if several and isinstance(word, str) and weights.tokenizer is not None and word.strip():
        return tuple(word_ids(weights.tokenizer, word))
    return (_one_id(weights, word, n_tokens),)


def _one_id(weights: HeadWeights, word: TokenLike, n_vocab: int) -> int:
    """The token of a word; a word of several tokens is refused with words near it that have one."""
    try:
        return single_id(weights.tokenizer, word, n_vocab)
    except TokenError as error:
        if not isinstance(word, str) or not word.strip():
            raise
        near = near_words(weights.tokenizer, word, n_vocab)
        if not near:
            raise
        raise TokenError(f"{error} Single tokens near it: {', '.join(near)}.") from None


def _labels(weights: HeadWeights, words: Sequence[TokenLike]) -> tuple[str, ...]:
    """Words as they were given; ids as the text of their token."""
    return tuple(
        word
        if isinstance(word, str)
        else (f"#{word}" if weights.tokenizer is None else token_string(weights.tokenizer, word))
        for word in words
    )
