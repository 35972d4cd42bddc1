"""Do two words attend to the same key alike? Head by head, over several phrasings, beside control words."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.running.activations import LayerActivations, run
from ..capture.running.text import EncodedText
from ..capture.weights import HeadWeights
from ..core.errors import TokenError, UsageError
from ..core.options import Draws, public
from ..core.provenance import Provenance
from ..core.types import HeadIndex, Model
from ..core.vocabulary import TokenLike, token_position, word_place
from ..renderers.charts import scatter
from ..renderers.figure import Figure
from ..renderers.text import interval, number, quoted, significant, wrapped
from ..results import largest_heads
from ..results.table import HeadTable, frozen_result, measured
from ..scorers.mixing import (
    difference_of,
    largest_difference_p_values,
    separation_p_value,
    word_correlations,
)
from ..scorers.statistics import other_assignments

_ALPHA = 0.05


@dataclass(frozen=True)
class Phrase:
    """One phrasing: its text and tokens, the word that asks, and the positions of query and key."""

    text: str
    word: str
    tokens: tuple[str, ...]
    query: int
    key: int
    n_pieces: int


@frozen_result
class AttentionComparison(HeadTable):
    """Attention of two words to one key in every head, and how far the two differ.

    Example:
        >>> from tl_headmaps import compare_attention, load_default_model
        >>> phrases = {"Birds sometimes walk": "walk", "But birds are good at flying": "flying"}
        >>> found = compare_attention(load_default_model(), phrases, "birds")
        >>> found.words, found.attention.shape, round(float(found.correlation[0, 1]), 2)
        (('walk', 'flying'), torch.Size([2, 30, 9]), 0.13)
    """

    kind: ClassVar[str] = "attention_comparison"
    methods: ClassVar[tuple[str, ...]] = ("elhage2021framework", "westfall1993resampling")
    json_axes: ClassVar[dict[str, str | None]] = {"word": "words", "phrase": None, "layer": None, "head": None}
    json_extra: ClassVar[tuple[str, ...]] = ("notes",)
    signed: ClassVar[bool] = True
    listed: ClassVar[int] = 10
    fixed: ClassVar[tuple[str, ...]] = ("key", "words")
    nullable: ClassVar[tuple[str, ...]] = ("separation_p",)
    paper_columns: ClassVar[tuple[str, ...]] = ()

    words: tuple[str, ...] = measured("fact", "words", "the two words that are compared, then the control words")
    key: str = measured("fact", "key", "the word they attend to")
    phrases: tuple[Phrase, ...] = measured("fact", "phrases", "every phrasing, in the order of ``attention``")
    attention: Float[Tensor, "phrase layer head"] = measured(
        "fact", "attention", "attention of each phrasing's query to its key"
    )
    difference: Float[Tensor, "layer head"] = measured(
        "value", "difference", "mean over phrasings of the first word minus that of the second", unit="attention"
    )
    interval_low: Float[Tensor, "layer head"] = measured("low", "95%", "over phrasings (jackknife)")
    interval_high: Float[Tensor, "layer head"] = measured("high", "95%", "upper end")
    p_value: Float[Tensor, "layer head"] = measured(
        "p", "p", "how often any head differs as much when phrasings are dealt out to the two words otherwise"
    )
    correlation: Float[Tensor, "word word"] = measured(
        "fact",
        "correlation",
        "mean correlation over heads of two phrasings, by their words; on the diagonal, of two different phrasings of "
        "one word",
    )
    correlation_low: Float[Tensor, "word word"] = measured("fact", "95%", "its interval over phrasings (jackknife)")
    correlation_high: Float[Tensor, "word word"] = measured("fact", "95%", "upper end")
    separation_p: float = measured(
        "fact",
        "p of separation",
        "how often phrasings of a word are as much closer to each other than to the other word's, dealt out otherwise",
    )
    n_deals: int = measured("fact", "deals", "other ways of dealing that were tried")
    exact: bool = measured("fact", "exact", "whether these are all there are")
    provenance: Provenance

    def mean(self, word: str) -> Float[Tensor, "layer head"]:
        """Attention of a word to the key, averaged over its phrasings."""
        if word not in self.words:
            raise UsageError(f"{word!r} was not asked about. The words are {', '.join(map(repr, self.words))}.")
        return self.attention[_members(self.phrases, word)].mean(0)

    def top(self, n: int = 5, label: str | None = None) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads whose attention differs most, either way (ties: lower layer, then lower head)."""
        differences = self.head_map(label)
        return [(head, float(differences[head.layer, head.head])) for head, _ in largest_heads(differences.abs(), n)]

    def differ(self, alpha: float = _ALPHA) -> list[HeadIndex]:
        """The heads whose difference is larger than that of any head in all but a share ``alpha`` of other deals."""
        return [HeadIndex(*at) for at in (self.p_value <= alpha).nonzero().tolist()]

    @property
    def smallest_p(self) -> float:
        """The smallest p-value that this many phrasings allow."""
        # With equal numbers, exchanging the two words changes no difference.
        sizes = [len(_members(self.phrases, word)) for word in self.words[:2]]
        return (2 if self.exact and sizes[0] == sizes[1] else 1) / (1 + self.n_deals)

    @property
    def caption(self) -> str:
        """What was asked, and the answer in words."""
        counts = ", ".join(f"{word!r} {len(_members(self.phrases, word))}" for word in self.words)
        return f"Attention to {self.key!r} over {len(self.phrases)} phrasings ({counts}).\n\n{wrapped(self.verdict())}"

    def notes(self) -> tuple[str, ...]:
        """What to keep in mind, as sentences."""
        notes = []
        skipped = int(bool(self.provenance.options.get("prepend_bos")))
        up_to_key = ["".join(phrase.tokens[skipped : phrase.key + 1]) for phrase in self.phrases]
        first = [text for text in up_to_key if len(text.split()) == 1]
        if first:
            notes.append(
                f"in {len(first)} of {len(self.phrases)} phrases {self.key!r} is the first word, where many heads park "
                "their attention regardless of its meaning; phrasings with a word before it say more"
            )
        for phrase in self.phrases:
            if phrase.n_pieces > 1:
                notes.append(
                    f"in {phrase.text!r} the query or the key has {phrase.n_pieces} tokens; its last one stands for it"
                )
        if len(self.words) == 2:
            notes.append("without a control phrase nobody knows how much any two words differ; give control=")
        if self.smallest_p > _ALPHA:
            sizes = " and ".join(str(len(_members(self.phrases, word))) for word in self.words[:2])
            notes.append(
                f"with {sizes} phrasings no p-value can be below {self.smallest_p:.2g}; give at least 4 of each word"
            )
        return tuple(notes)

    def verdict(self) -> str:
        """The answer in words."""
        one, other = self.words[:2]
        parts = [
            f"Attention of {one!r} and {other!r} to {self.key!r} correlates over heads with {self._correlation(0, 1)}."
        ]
        within = [f"{word!r} {self._correlation(i, i)}" for i, word in enumerate(self.words[:2]) if self._several(i)]
        if within:
            parts.append(f"Two phrasings of one word: {', '.join(within)}.")
        controls = [f"{one!r} and {word!r} {self._correlation(0, i)}" for i, word in enumerate(self.words) if i > 1]
        if controls:
            parts.append(f"Control: {', '.join(controls)}.")
        if self.separation_p == self.separation_p:
            are = "are" if self.separation_p <= _ALPHA else "are not shown to be"
            p = significant(self.separation_p, 2)
            parts.append(f"Phrasings of one word {are} more alike than phrasings of the two (p = {p}).")
        n_heads = int((~self.difference.isnan()).sum())
        if self.smallest_p <= _ALPHA:
            differ = self.differ()
            listed = f": {', '.join(map(str, differ))}" if 0 < len(differ) <= 8 else ""
            verb = "differs" if len(differ) == 1 else "differ"
            parts.append(f"{len(differ)} of {n_heads} heads {verb} (p <= {_ALPHA} that any does){listed}.")
        else:
            parts.append("Too few phrasings to say of a head that it differs.")
        return " ".join(parts)

    def _several(self, word: int) -> bool:
        return not bool(self.correlation[word, word].isnan())

    def _correlation(self, one: int, other: int) -> str:
        low, high = float(self.correlation_low[one, other]), float(self.correlation_high[one, other])
        between = "" if low != low else f" ({interval(low, high)})"
        return number(float(self.correlation[one, other])) + between

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head, with the attention of each word."""
        means = {f"attention_{word}": self.mean(word) for word in self.words}
        for row in super().to_rows():
            at = row["layer"], row["head"]
            yield row | {name: float(mean[at]) for name, mean in means.items()}

    def figure(self) -> Figure:  # type: ignore[override]
        """One point per head: attention of the one word against that of the other, equal on the diagonal."""
        one, other = self.words[:2]
        groups = [
            "differs" if float(p) <= _ALPHA else "not more than by chance"
            for p in self.p_value.nan_to_num(nan=1.0).flatten()
        ]
        return scatter(
            self.mean(one),
            self.mean(other),
            groups=groups if self.smallest_p <= _ALPHA else None,
            title=f"Attention to {quoted(self.key)}: {quoted(one)} against {quoted(other)}",
            x_name=f"attention of {quoted(one)}",
            y_name=f"attention of {quoted(other)}",
            diagonal=True,
            note=" ".join([self.verdict(), *(f"Note: {note}." for note in self.notes())]),
        )


@public
def compare_attention(
    model: Model,
    phrases: Mapping[str, TokenLike],
    key: TokenLike,
    *,
    control: Mapping[str, TokenLike] | None = None,
    n_null: Draws = 2000,
    prepend_bos: bool | None = None,
) -> AttentionComparison:
    """How much two words attend to one key, head by head, and whether they differ more than phrasings do anyway.

    Args:
        phrases: Each phrase with its query: ``{"Birds sometimes walk": "walk", ...}``. Phrases with the same query are
            phrasings of it; two different queries are compared. Four phrasings of each, or more, allow p-values. A
            query may also be an index of a token (-1 is the last).
        key: The word they attend to; it stands before the query in every phrase. Upper and lower case are the same.
            ``birds#2`` is the second one; a word of several tokens is its last one.
        control: Phrases with other queries, which say how much words differ anyway.
        n_null: Other ways of dealing the phrasings out that are tried; all, if there are no more.

    Example:
        >>> from tl_headmaps import compare_attention, load_default_model
        >>> phrases = {"Birds sometimes walk": "walk", "But birds are good at flying": "flying"}
        >>> control = {"But birds are good at math": "math"}
        >>> found = compare_attention(load_default_model(), phrases, "birds", control=control)
        >>> round(float(found.correlation[0, 1]), 2), round(float(found.correlation[0, 2]), 2)
        (0.13, -0.02)
    """
    compared, others = (
        {text: query if isinstance(query, str) else _token_at(model, text, query, prepend_bos) for text, query in items}
        for items in (phrases.items(), (control or {}).items())
    )
    words = _checked(compared, others)
    places = {**phrases, **(control or {})}
    read = [
        _phrase(model, text, (query, places[text]), key, prepend_bos) for text, query in (compared | others).items()
    ]
    weights = HeadWeights.of(model)
    weights.require_even_heads("comparisons over all heads")
    attention = torch.full((len(read), weights.n_layers, weights.n_heads), float("nan"))

    def reduce(seen: LayerActivations) -> None:
        for place, row in enumerate(seen.batch.rows):
            at = read[row][1]
            attention[row, seen.layer] = seen["pattern"][place, :, at.query, at.key].to("cpu", torch.float32)

    run(model, [prompt.ids for prompt, _ in read], read=("pattern",), reduce=reduce)
    found = tuple(phrase for _, phrase in read)
    flat = attention[:, weights.layers_with_heads].flatten(1)
    members = [_members(found, word) for word in words]
    pair = [*members[0], *members[1]]
    own = torch.tensor([phrase in members[0] for phrase in pair])
    deals, exact = other_assignments(own, n_null)
    difference, half = difference_of(flat, members[0], members[1])
    correlation, correlation_half = word_correlations(flat, members)

    def as_map(values: Tensor) -> Tensor:
        return weights.over_all_layers(values.float().reshape(-1, weights.n_heads))

    return AttentionComparison(
        words=words,
        key=_key_word(key, found),
        phrases=found,
        attention=attention,
        difference=as_map(difference),
        interval_low=as_map(difference - half),
        interval_high=as_map(difference + half),
        p_value=as_map(largest_difference_p_values(flat[pair], own, deals)),
        correlation=correlation.float(),
        correlation_low=(correlation - correlation_half).clamp(-1, 1).float(),
        correlation_high=(correlation + correlation_half).clamp(-1, 1).float(),
        separation_p=separation_p_value(flat[pair], own, deals),
        n_deals=len(deals),
        exact=exact,
        provenance=weights.provenance(
            runs_model=True, options={"n_null": n_null, "prepend_bos": read[0][0].prepend_bos}, seed=0
        ),
    )


def _token_at(model: Model, text: str, place: int, prepend_bos: bool | None) -> str:
    tokens = EncodedText.of(model, text, prepend_bos=prepend_bos, least=2, what="a query and its key need two").tokens
    return tokens[token_position(tokens, place)].strip()


def _key_word(key: TokenLike, phrases: Sequence[Phrase]) -> str:
    """The key as a word; an index must mean the same one in every phrase."""
    if isinstance(key, str):
        return key.strip()
    meant = list(dict.fromkeys(phrase.tokens[phrase.key].strip().lower() for phrase in phrases))
    if len(meant) > 1:
        raise UsageError(
            f"Token {key} is {' and '.join(map(repr, meant[:2]))} in different phrases, and all attend to one key. "
            "Give the key as a word."
        )
    return meant[0]


def _checked(phrases: Mapping[str, str], control: Mapping[str, str]) -> tuple[str, ...]:
    """The words, compared ones first."""
    compared = list(dict.fromkeys(map(_word, phrases.values())))
    if len(phrases) < 2:
        raise UsageError(
            f"{len(phrases)} phrase was given, and two words are compared. Give at least two phrases, each with its "
            'query: {"Birds sometimes walk": "walk", "But birds are good at flying": "flying"}.'
        )
    if len(compared) != 2:
        raise UsageError(
            f"The phrases ask about {len(compared)} different words ({', '.join(map(repr, compared))}), and two are "
            "compared. Give phrasings of two queries; others belong to control=."
        )
    controls = list(dict.fromkeys(map(_word, control.values())))
    for what in set(controls) & set(compared):
        raise UsageError(
            f"{what!r} is compared and cannot be its own control. Give control phrases with other queries."
        )
    for text in set(control) & set(phrases):
        raise UsageError(f"{text!r} is a phrase and a control phrase at once. Give it once.")
    return (*compared, *controls)


def _phrase(
    model: Model, text: str, asking: tuple[str, TokenLike], key: TokenLike, prepend_bos: bool | None
) -> tuple[EncodedText, Phrase]:
    """A phrase with the places of its query (its word, and how it was given) and of the key."""
    query, given = asking
    prompt = EncodedText.of(model, text, prepend_bos=prepend_bos, least=2, what="a query and its key need two")
    try:
        (asks_from, asks), (key_from, place) = (word_place(prompt.tokens, each) for each in (given, key))
    except TokenError as error:
        raise TokenError(f"Phrase {text!r}: {error}") from error
    if place >= asks_from:
        raise UsageError(
            f"In {text!r} the key {key!r} does not come before the query {query!r}, so no head can see it from there. "
            "Rephrase it so that the key comes first."
        )
    pieces = max(asks - asks_from, place - key_from) + 1
    return prompt, Phrase(text, _word(query), prompt.tokens, asks, place, pieces)


def _word(query: str) -> str:
    return query.partition("#")[0].strip().lower()


def _members(phrases: Iterable[Phrase], word: str) -> list[int]:
    return [place for place, phrase in enumerate(phrases) if phrase.word == word]
