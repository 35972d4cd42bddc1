"""What a head is worth to the model: how much worse it predicts held-out text when the head says the same everywhere.

A head is replaced by its mean: what it hands to W_O on average over the texts to fit on, at every position. What it
says about this very token is gone, and what it always says is kept. The loss on held-out texts is compared with that of
the whole model, token by token. All heads are measured one at a time; what others make up for does not show.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.running.ablated import mean_outputs
from ..capture.running.activations import PromptBatch, encode_prompt, prepends_bos
from ..capture.running.later_start import run_without_each
from ..capture.running.text import check_runs
from ..capture.weights import HeadWeights
from ..core.ambient import steady
from ..core.errors import UsageError
from ..core.progress import Progress
from ..core.provenance import Provenance
from ..core.types import HeadIndex, HeadLike, Model, by_layer
from ..data.texts import Sample, describe_source, split_texts
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.heat import head_map
from ..renderers.text import signed, table_text, wrapped
from ..results import HeadMaps, cells
from ..scorers.statistics import RunningRatio

_LISTED = 12
"""Heads that are printed, at most."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadWorth(HeadMaps):
    """How much the loss on held-out texts rises when each head is replaced by its mean, in nats per token.

    Attributes:
        worth: Rise of the loss; NaN for heads that were not asked for. Negative: the model is better off with the mean.
        interval_low, interval_high: 95% interval over held-out texts (Student's); NaN for a single one.
        loss: Loss of the whole model on the same tokens.
        n_texts: Held-out texts.
        n_fit_texts: Texts that means were taken over.
        n_tokens: Tokens of the held-out texts that were predicted.

    Example:
        >>> from tl_headmaps import head_worth, load_default_model
        >>> texts = [f"There were {n} cups on table {n + 1}." for n in range(6)]
        >>> worth = head_worth(load_default_model(), ["L0H2", "L0H3"], texts, progress=False)
        >>> worth.n_texts, worth.n_fit_texts
        (2, 4)
        >>> [str(head) for head, _ in worth.top()]
        ['L0H3', 'L0H2']
    """

    kind: ClassVar[str] = "head_worth"
    methods: ClassVar[tuple[str, ...]] = ("wang2023interpretability",)
    json_axes: ClassVar[Mapping[str, str | None]] = {"layer": None, "head": None}
    nullable: ClassVar[tuple[str, ...]] = ("worth", "interval_low", "interval_high")
    worth: Float[Tensor, "layer head"]
    interval_low: Float[Tensor, "layer head"]
    interval_high: Float[Tensor, "layer head"]
    loss: float
    n_texts: int
    n_fit_texts: int
    n_tokens: int
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "layer head"]:
        """The rise of the loss."""
        return self.worth

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head."""
        for at, labels in cells(self.axes, self.worth):
            columns = ("worth", "interval_low", "interval_high")
            yield labels | {name: float(getattr(self, name)[at]) for name in columns}

    @property
    def caption(self) -> str:
        """What was measured, in a sentence."""
        return (
            f"Rise of the loss on {self.n_texts} held-out texts ({self.n_tokens:,} tokens; whole model: "
            f"{self.loss:.2f} nats per token) when one head is replaced by its mean."
        )

    def row(self, head: HeadIndex) -> list[str]:
        """A head, what it is worth, and the interval."""
        at = (head.layer, head.head)
        low, high = float(self.interval_low[at]), float(self.interval_high[at])
        known = f"{signed(low, 2)} to {signed(high, 2)}" if low == low else "-"
        return [str(head), signed(float(self.worth[at]), 2), known, self._verdict(low, high)]

    @staticmethod
    def _verdict(low: float, high: float) -> str:
        return "helps" if low > 0 else "harms" if high < 0 else ""

    def __str__(self) -> str:
        measured = self.n_measured
        rows = [self.row(head) for head, _ in self.top(_LISTED)]
        more = f"\n({measured - len(rows)} heads that are worth less are not shown)" if measured > len(rows) else ""
        columns = [
            (f"best of {measured}", "left"),
            ("rise of the loss", "right"),
            ("95% over texts", "right"),
            ("", "left"),
        ]
        key = (
            "helps, harms: the interval of that head alone is above or below 0, as it is by chance for about one in "
            "twenty heads that are worth nothing"
        )
        return f"{self.caption}\n\n{table_text(columns, rows)}{more}\n\n{wrapped(key)}"

    def figure(self) -> Figure:
        """The rise of the loss by layer and head, with its interval."""
        return head_map(
            [MapLayer("", self.worth, interval=(self.interval_low, self.interval_high))],
            title="What heads are worth",
            unit="rise of the loss, nats per token",
            signed=True,
            empty=self.provenance.short_rows,
            note=f"{self.caption} 95% interval over texts.",
        )


@steady
def head_worth(
    model: Model,
    heads: HeadLike | Iterable[HeadLike] | None = None,
    texts: Any = None,
    *,
    max_texts: int | None = None,
    max_tokens: int = 64,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> HeadWorth:
    """How much worse a model predicts held-out text when a head is replaced by its mean, head by head.

    Means are taken over two thirds of the texts, the loss over the others. Each head costs a pass through these, from
    its own layer on.

    Args:
        model: A TransformerBridge or HookedTransformer with a tokenizer.
        heads: Only these heads; all by default.
        texts: Documents (a list, a file, a dataset); the bundled text by default.
        max_texts: At most this many held-out texts, and twice as many to take means over, evenly spaced; all by
            default.
        max_tokens: Cut texts to this many tokens.
        prepend_bos: Begin each text with BOS; by default as the model does.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import head_worth, load_default_model
        >>> texts = ["Birds sometimes walk to the river and drink.", "The cat sat on the mat all day.",
        ...          "It rained on Monday and again on Tuesday."] * 2
        >>> texts += [f"There were {n} cups on table {n + 1}." for n in range(6)]
        >>> worth = head_worth(load_default_model(), ["L23H4", "L0H2"], texts, max_tokens=16, progress=False)
        >>> str(worth.top(1)[0][0])
        'L23H4'
    """
    check_runs(model)
    if max_texts is not None and max_texts < 2:
        raise UsageError(f"max_texts={max_texts} is too few: an interval needs at least two texts.")
    if max_tokens < 3:
        raise UsageError(f"max_tokens={max_tokens} is too short. A text needs at least 3 tokens.")
    weights = HeadWeights.from_model(model)
    chosen = weights.chosen_heads(heads)
    prepend_bos = prepends_bos(model, prepend_bos)
    longest = min(max_tokens, int(model.cfg.n_ctx))
    fit, held_out = (
        [ids for text in part if len(ids := encode_prompt(model, text, prepend_bos)[:longest]) >= 3]
        for part in split_texts(Sample.WHOLE if texts is None else texts)
    )
    if not fit or len(held_out) < 2:
        raise UsageError(
            f"{len(fit) + len(held_out)} texts are too few: a third of them is held out, and at least two are needed "
            "there. Give more texts, or longer ones separated by blank lines."
        )
    if max_texts is not None:
        fit, held_out = _spaced(fit, 2 * max_texts), _spaced(held_out, max_texts)
    means = mean_outputs(model, fit, list(by_layer(chosen)))
    n_passes = (1 + len(chosen)) * len(held_out)
    with Progress(total=n_passes, desc="worth of heads", unit="pass", show=progress) as bar:
        losses = _losses(model, held_out, chosen, means, bar.update)
    n_targets = [len(ids) - 1 for ids in held_out]
    digest = hashlib.sha256(repr((fit, held_out)).encode()).hexdigest()
    source = describe_source(Sample.WHOLE if texts is None else texts)
    options: dict[str, Any] = {"max_texts": max_texts, "max_tokens": max_tokens, "prepend_bos": prepend_bos}
    options["heads"] = None if heads is None else [str(head) for head in chosen]
    worth, low, high = (_mapped(values, chosen, weights) for values in rise_with_interval(losses, n_targets))
    return HeadWorth(
        worth=worth,
        interval_low=low,
        interval_high=high,
        loss=float(losses[0].sum()) / sum(n_targets),
        n_texts=len(held_out),
        n_fit_texts=len(fit),
        n_tokens=sum(n_targets),
        provenance=weights.provenance(runs_model=True, options=options, data={"texts": digest, "source": source}),
    )


def _spaced(texts: list[list[int]], n: int) -> list[list[int]]:
    """At most ``n`` of the texts, from the first on at even distances: the bundled registers take turns."""
    return texts if len(texts) <= n else [texts[place * len(texts) // n] for place in range(n)]


def _losses(
    model: Model,
    documents: Sequence[Sequence[int]],
    heads: Sequence[HeadIndex],
    means: Mapping[int, Tensor],
    progress: Any,
) -> Float[Tensor, "one_and_heads document"]:
    """Loss of each document, summed over its tokens: of the whole model, then with each head replaced."""
    losses = torch.zeros(1 + len(heads), len(documents), dtype=torch.float64)

    def take(number: int, logits: Float[Tensor, "batch pos vocab"], batch: PromptBatch) -> None:
        for row, own, ids in zip(batch.rows, logits, batch.ids, strict=True):
            loss = torch.nn.functional.cross_entropy(own[:-1].float(), ids[1:], reduction="none")
            losses[number, row] = loss.double().sum()

    run_without_each(model, documents, heads, means, take, progress=progress)
    return losses


def rise_with_interval(
    losses: Float[Tensor, "one_and_heads document"], n_targets: Sequence[int]
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Rise of the loss per token over that of the first row, and the ends of its 95% interval over documents."""
    running = RunningRatio(len(losses) - 1)
    for own, n in zip(losses.T, n_targets, strict=True):
        running.add(own[1:] - own[0], float(n))
        running.next_unit()
    rise, half = running.ratio(), running.half_width()
    return rise, rise - half, rise + half


def _mapped(values: Tensor, heads: Sequence[HeadIndex], weights: HeadWeights) -> Float[Tensor, "layer head"]:
    spread = torch.full((weights.n_layers, weights.n_heads), torch.nan)
    spread[[head.layer for head in heads], [head.head for head in heads]] = values.float()
    return spread
