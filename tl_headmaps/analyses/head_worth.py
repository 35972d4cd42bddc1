"""What a head is worth to the model: how much worse it predicts held-out text when the head says the same everywhere.

A head is replaced by its mean: what it hands to W_O on average over the texts to fit on, at every position. What it
says about this very token is gone, and what it always says is kept. The loss on held-out texts is compared with that of
the whole model, token by token. All heads are measured one at a time; what others make up for does not show.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..capture.running.ablated import mean_outputs, run_replacing_each
from ..capture.running.activations import PromptBatch
from ..core.options import Count, public
from ..core.provenance import Provenance
from ..core.types import HeadLike, Model, by_layer
from ..results.table import HeadTable, frozen_result, measured
from ..scorers.statistics import RunningRatio
from .study import Study


@frozen_result
class HeadWorth(HeadTable):
    """How much the loss on held-out texts rises when each head is replaced by its mean, in nats per token.

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
    signed: ClassVar[bool] = True
    title: ClassVar[str] = (
        "What heads are worth: rise of the loss on {self.n_texts} held-out texts ({self.n_tokens:,} tokens; whole "
        "model: {self.loss:.2f} nats per token) when one head is replaced by its mean."
    )

    worth: Float[Tensor, "layer head"] = measured(
        "value", "rise of the loss", "negative where the model is better off with the mean", unit="nats per token"
    )
    interval_low: Float[Tensor, "layer head"] = measured("low", "95%", "over held-out texts (Student's)")
    interval_high: Float[Tensor, "layer head"] = measured("high", "95%", "upper end")
    loss: float = measured("fact", "loss", "of the whole model on the same tokens, in nats per token")
    n_texts: int = measured("fact", "held-out texts")
    n_fit_texts: int = measured("fact", "texts that means were taken over")
    n_tokens: int = measured("fact", "tokens of the held-out texts that were predicted")
    provenance: Provenance

    def notes(self) -> list[str]:
        helps, harms = int((self.interval_low > 0).sum()), int((self.interval_high < 0).sum())
        return [
            f"The interval of a head alone is above 0 for {helps} heads and below 0 for {harms}, as it is by chance "
            "for about one in twenty heads that are worth nothing."
        ]


@public
def head_worth(
    model: Model,
    heads: HeadLike | Iterable[HeadLike] | None = None,
    texts: Any = None,
    *,
    max_texts: Count | None = None,
    max_tokens: Count = 64,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> HeadWorth:
    """How much worse a model predicts held-out text when a head is replaced by its mean, head by head.

    Means are taken over two thirds of the texts, the loss over the others. Each head costs a pass through these, from
    its own layer on.

    Args:
        model: A TransformerBridge or HookedTransformer with a tokenizer.
        max_texts: At most this many held-out texts, and twice as many to take means over, evenly spaced; all by
            default.

    Example:
        >>> from tl_headmaps import head_worth, load_default_model
        >>> texts = ["Birds sometimes walk to the river and drink.", "The cat sat on the mat all day.",
        ...          "It rained on Monday and again on Tuesday."] * 2
        >>> texts += [f"There were {n} cups on table {n + 1}." for n in range(6)]
        >>> worth = head_worth(load_default_model(), ["L23H4", "L0H2"], texts, max_tokens=16, progress=False)
        >>> str(worth.top(1)[0][0])
        'L23H4'
    """
    study = Study(model, heads=heads, prepend_bos=prepend_bos, progress=progress)
    fit, held_out = study.documents(texts, max_tokens=max_tokens, max_texts=max_texts)
    means = mean_outputs(model, fit, list(by_layer(study.heads)))
    losses = torch.zeros(1 + len(study.heads), len(held_out), dtype=torch.float64)

    def take(number: int, logits: Float[Tensor, "batch pos vocab"], batch: PromptBatch) -> None:
        for row, scores, ids in zip(batch.rows, logits, batch.ids, strict=True):
            losses[number, row] = cross_entropy(scores[:-1].float(), ids[1:], reduction="none").double().sum()

    with study.bar("worth of heads", "pass", losses.numel()) as bar:
        run_replacing_each(model, held_out, study.heads, means, take, progress=bar.update)
    n_targets = [len(ids) - 1 for ids in held_out]
    worth, low, high = map(study.as_map, rise_with_interval(losses, n_targets))
    return HeadWorth(
        worth=worth,
        interval_low=low,
        interval_high=high,
        loss=float(losses[0].sum()) / sum(n_targets),
        n_texts=len(held_out),
        n_fit_texts=len(fit),
        n_tokens=sum(n_targets),
        provenance=study.provenance(runs_model=True, max_texts=max_texts, max_tokens=max_tokens),
    )


def rise_with_interval(
    losses: Float[Tensor, "one_and_heads document"], n_targets: Sequence[int]
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Rise of the loss per token over that of the first row, and the ends of its 95% interval over documents."""
    running = RunningRatio(len(losses) - 1)
    for loss, n in zip(losses.T, n_targets, strict=True):
        running.add(loss[1:] - loss[0], float(n))
        running.next_unit()
    rise, half = running.ratio(), running.half_width()
    return rise, rise - half, rise + half
