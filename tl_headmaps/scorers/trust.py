r"""How much of what a head writes is told by which tokens it attends to.

A head writes z W_O at each position, z = A V. Let V' hold the values of the tokens' own vectors (without context, or as
read behind neutral prompts) and z' = A V' with the same attention A; keys that are sinks are left out of both. With
means m and m' over the positions of the texts fitted on, and one scale a fitted there,

    token share = 1 - sum |(z - m) W_O - a (z' - m') W_O|^2 / sum |(z - m) W_O|^2

over the positions of held-out texts: 1 when the tokens say everything, 0 when they say nothing, negative when the
fitted scale misleads. Lengths after W_O need only its d_head x d_head Gram matrix, so a text is six sums per head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float
from torch import Tensor

SINK_NORM = 6.0
"""A position is a sink of a layer when its stream is longer than this many times the median of its text."""


def sinks(stream: Float[Tensor, "pos d_model"]) -> Bool[Tensor, " pos"]:
    """Positions whose residual stream stands out by its length."""
    lengths = stream.float().norm(dim=-1)
    standing_out: Tensor = lengths > SINK_NORM * lengths.median()
    return standing_out


@dataclass(frozen=True)
class WriteSums:
    """Sums over the positions of a text, for each head: what is written, what tokens predict, and their products."""

    n: Float[Tensor, ""]
    written: Float[Tensor, "head d_head"]
    predicted: Float[Tensor, "head d_head"]
    written_square: Float[Tensor, " head"]
    predicted_square: Float[Tensor, " head"]
    product: Float[Tensor, " head"]

    @classmethod
    def of(
        cls,
        written: Float[Tensor, "pos head d_head"],
        predicted: Float[Tensor, "pos head d_head"],
        gram: Float[Tensor, "head d_head d_head"],
    ) -> "WriteSums":
        """The sums of one text; ``gram`` is W_O W_O^T of each head."""
        left, right = written.double(), predicted.double()
        left_out = torch.einsum("phd,hde->phe", left, gram.double())
        right_out = torch.einsum("phd,hde->phe", right, gram.double())
        return cls(
            torch.tensor(float(len(written)), dtype=torch.float64),
            left.sum(0),
            right.sum(0),
            (left_out * left).sum((0, 2)),
            (right_out * right).sum((0, 2)),
            (left_out * right).sum((0, 2)),
        )

    @classmethod
    def total(cls, parts: Sequence["WriteSums"]) -> "WriteSums":
        """The sums over several texts."""
        return cls(*(torch.stack([getattr(part, entry.name) for part in parts]).sum(0) for entry in fields(cls)))


@dataclass(frozen=True)
class Fit:
    """Means over the positions fitted on, and the scale of the prediction."""

    mean_written: Float[Tensor, "head d_head"]
    mean_predicted: Float[Tensor, "head d_head"]
    scale: Float[Tensor, " head"]

    @classmethod
    def of(cls, sums: WriteSums, gram: Float[Tensor, "head d_head d_head"]) -> "Fit":
        """Least squares over the texts fitted on."""
        m, m2 = sums.written / sums.n, sums.predicted / sums.n
        _, square, product = _centred(sums, m, m2, gram.double())
        # A head that predicts the same everywhere has no scale: its prediction is its mean.
        return cls(m, m2, torch.where(square > 0, product / square.clamp_min(1e-300), torch.zeros_like(product)))


def _centred(
    sums: WriteSums, m: Tensor, m2: Tensor, gram: Float[Tensor, "head d_head d_head"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Squares of what is written and predicted, and their product, about given means."""

    def about(square: Tensor, left: Tensor, right: Tensor, mean_left: Tensor, mean_right: Tensor) -> Tensor:
        across = torch.einsum("hd,hde,he->h", left, gram, mean_right)
        across = across + torch.einsum("hd,hde,he->h", mean_left, gram, right)
        return square - across + sums.n * torch.einsum("hd,hde,he->h", mean_left, gram, mean_right)

    return (
        about(sums.written_square, sums.written, sums.written, m, m),
        about(sums.predicted_square, sums.predicted, sums.predicted, m2, m2),
        about(sums.product, sums.written, sums.predicted, m, m2),
    )


def unexplained(
    sums: WriteSums, fit: Fit, gram: Float[Tensor, "head d_head d_head"]
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """What is left of a text after the prediction, and what there was: the two sums of the token share."""
    written, predicted, product = _centred(sums, fit.mean_written, fit.mean_predicted, gram.double())
    return written - 2 * fit.scale * product + fit.scale.square() * predicted, written


def share_with_interval(
    left: Float[Tensor, "document head"], total: Float[Tensor, "document head"], *, n_draws: int = 1000, seed: int = 0
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"], Float[Tensor, " head"]]:
    """``1 - sum(left) / sum(total)`` over documents, with a 95% interval from resampled documents."""
    generator = torch.Generator().manual_seed(seed)
    n = len(left)
    drawn = torch.randint(n, (n_draws, n), generator=generator)
    weights = torch.zeros(n_draws, n, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(n_draws, n, dtype=torch.float64)
    )
    shares = 1 - (weights @ left) / (weights @ total)
    low, high = shares.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    return 1 - left.sum(0) / total.sum(0), low, high


def permuted_within_deciles(counts: Sequence[int], generator: torch.Generator) -> list[int]:
    """A permutation of tokens in which each goes to one of the same decile of frequency."""
    order = sorted(range(len(counts)), key=lambda token: (counts[token], token))
    permutation = [0] * len(counts)
    for decile in torch.tensor(order).tensor_split(10):
        for token, other in zip(
            decile.tolist(), decile[torch.randperm(len(decile), generator=generator)].tolist(), strict=True
        ):
            permutation[token] = other
    return permutation
