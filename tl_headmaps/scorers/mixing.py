"""What attention does to the vectors it mixes: ``v_hat_q = sum_s a_qs v_s``, and who comes closer to whom.

The association of a query with a key is the dot product (or cosine) of their value vectors: before attention
``v_q . v_k``, after it ``v_hat_q . v_k``. It is linear in the sources, so it splits exactly:
``v_hat_q . v_k = sum_s a_qs (v_s . v_k)``. Its change ``v_hat_q . v_k - v_q . v_k`` splits in the same way, with
``a_qq - 1`` for the query itself, which gives up what attention takes from it.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def mixed(pattern: Float[Tensor, "query key"], values: Float[Tensor, "key d_head"]) -> Float[Tensor, "query d_head"]:
    """Values after attention."""
    return pattern @ values


def dots(left: Float[Tensor, "query d_head"], right: Float[Tensor, "key d_head"]) -> Float[Tensor, "query key"]:
    """Dot product of every two vectors."""
    return left @ right.mT


def cosines(left: Float[Tensor, "query d_head"], right: Float[Tensor, "key d_head"]) -> Float[Tensor, "query key"]:
    """Cosine of every two vectors; 0 where one of them is zero.

    Example:
        >>> cosines(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[2.0, 2.0]]))
        tensor([[1.0000],
                [0.0000]])
    """
    return dots(_unit(left), _unit(right))


def _unit(vectors: Tensor) -> Tensor:
    lengths = vectors.norm(dim=-1, keepdim=True)
    return torch.where(lengths > 0, vectors / lengths.clamp_min(torch.finfo(vectors.dtype).tiny), 0.0)


def split_after(
    row: Float[Tensor, " source"], values: Float[Tensor, "source d_head"], key: int
) -> Float[Tensor, " source"]:
    """Part of each source in the association after attention; the parts add up to it."""
    return row * (values @ values[key])


def split_change(
    row: Float[Tensor, " source"], values: Float[Tensor, "source d_head"], query: int, key: int
) -> Float[Tensor, " source"]:
    """Part of each source in the change of the association; the parts add up to the change."""
    gained = row.clone()
    gained[query] -= 1
    return gained * (values @ values[key])


def strongest_dimensions(parts: Float[Tensor, " d_head"], n: int) -> Int[Tensor, " n"]:
    """The dimensions with the largest parts, either sign, largest first (ties: the lower one)."""
    return parts.abs().argsort(descending=True, stable=True)[:n]


def shared_dimensions(parts: Float[Tensor, "word d_head"], n: int) -> Int[Tensor, " word"]:
    """How many of the ``n`` strongest dimensions of the first word are among those of each word.

    Example:
        >>> shared_dimensions(torch.tensor([[3.0, -2.0, 1.0], [0.0, -4.0, 5.0]]), 2)
        tensor([2, 1])
    """
    chosen = torch.zeros(parts.shape, dtype=torch.bool)
    for row, own in zip(chosen, parts, strict=True):
        row[strongest_dimensions(own, n)] = True
    return (chosen & chosen[0]).sum(1)


def shared_when_turned(
    vectors: Float[Tensor, "word d_head"], keys: Float[Tensor, "word d_head"], n: int, n_draws: int, seed: int = 0
) -> Int[Tensor, "draw word"]:
    """The same count in randomly turned bases, in which all dot products are what they were."""
    generator = torch.Generator().manual_seed(seed)
    d, counts = vectors.shape[1], []
    for _ in range(n_draws):
        turned: Tensor = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
        counts.append(shared_dimensions((vectors.double() @ turned) * (keys.double() @ turned), n))
    return torch.stack(counts)
