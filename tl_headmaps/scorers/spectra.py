"""Singular values of many weight matrices, faster than a singular value decomposition of each.

The squares of the singular values of W are the eigenvalues of its smaller Gram matrix. Squaring costs digits: an
eigenvalue is exact to rounding times the largest one. In float64 that leaves a singular value 1e-6 times the largest
with four digits, where a float32 decomposition has none; smaller ones come out as less than 1e-7 of the largest.

On a CPU the problems of several matrices run side by side, one thread each, which uses the cores better than threads
inside one problem of this size, and gives the same digits for any number of threads.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.tensors import in_float64

_T = TypeVar("_T")
_S = TypeVar("_S")


class WeightMatrix:
    """One weight matrix and what metrics ask of it, each computed at most once.

    Attributes:
        weight: Rows inputs, columns outputs, in the stored type.
        writes: Whether its outputs (columns) go to the residual stream; its inputs (rows) come from there otherwise.
    """

    def __init__(self, weight: Float[Tensor, "rows columns"], writes: bool = False) -> None:
        self.weight, self.writes = weight.detach(), writes

    @cached_property
    def exact(self) -> Float[Tensor, "rows columns"]:
        """The matrix in float64."""
        return in_float64(self.weight)

    @cached_property
    def frobenius(self) -> float:
        """Square root of the sum of squares."""
        return float(self.exact.norm())

    @cached_property
    def singular_values(self) -> Float[Tensor, " rank"]:
        """All singular values, largest first, float64."""
        rows, columns = self.weight.shape
        gram = _gram(self.exact if rows <= columns else self.exact.mT)
        return _eigenvalues(gram).clamp_min(0).sqrt().flip(0).cpu()

    def stream_basis(self, k: int) -> Float[Tensor, "stream k"]:
        """Orthonormal basis of the k strongest directions on the side of the residual stream."""
        side = self.exact.mT if self.writes else self.exact
        if side.shape[0] <= side.shape[1]:
            return _leading(_gram(side), k)
        # The other side has the smaller Gram matrix; its strongest directions, sent through W, span the same space.
        basis: Tensor = torch.linalg.qr(side @ _leading(_gram(side.mT), k)).Q
        return basis


def _gram(side: Float[Tensor, "short long"]) -> Float[Tensor, "short short"]:
    if side.device.type == "cpu":
        # numpy sees the same matrix twice and computes one half only.
        rows = side.numpy()
        return torch.from_numpy(rows @ rows.T)
    return side @ side.mT


def _eigenvalues(gram: Float[Tensor, "n n"]) -> Float[Tensor, " n"]:
    if gram.device.type == "cpu":
        # Unlike scipy's, numpy's leaves the interpreter to other threads meanwhile.
        return torch.from_numpy(np.linalg.eigvalsh(gram.numpy()))
    values: Tensor = torch.linalg.eigvalsh(gram)
    return values


def _leading(gram: Float[Tensor, "n n"], k: int) -> Float[Tensor, "n k"]:
    n = gram.shape[0]
    if gram.device.type == "cpu":
        from scipy.linalg import eigh

        _, vectors = eigh(gram.numpy(), subset_by_index=(n - k, n - 1), overwrite_a=True, check_finite=False)
        return torch.from_numpy(vectors)
    basis: Tensor = torch.linalg.eigh(gram).eigenvectors[:, n - k :]
    return basis


def parallel_map(function: Callable[[_S], _T], items: Iterable[_S]) -> Iterator[_T]:
    """``map`` in as many threads as torch uses, linear algebra held to one thread in each; a few items at a time."""
    workers = torch.get_num_threads()
    waiting = iter(items)
    with _one_thread_each(), ThreadPoolExecutor(workers) as pool:
        while block := list(islice(waiting, 4 * workers)):
            yield from pool.map(function, block)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Torch and linear algebra without threads of their own, here and in threads started meanwhile."""
    # A library loaded later would not know of the limit.
    import scipy.linalg  # noqa: F401
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(threads)


def product_singular_values(
    left: Float[Tensor, "*batch d rank"], right: Float[Tensor, "*batch other rank"]
) -> Float[Tensor, "*batch smallest"]:
    """Singular values of ``left @ right.mT``, largest first, float64, from its factors: the product is never formed.

    With ``left = Q R`` and ``right = Q' R'`` they are those of ``R @ R'.mT``, which is at most rank x rank.
    """
    triangles = [torch.linalg.qr(in_float64(factor), mode="r").R for factor in (left, right)]
    values: Tensor = torch.linalg.svdvals(triangles[0] @ triangles[1].mT)
    return values.cpu()


def entropy_rank(singular_values: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """Effective rank: exponential of the entropy of singular values divided by their sum (Roy and Vetterli, 2007)."""
    shares = singular_values / singular_values.sum(-1, keepdim=True)
    rank: Tensor = torch.special.entr(shares).sum(-1).exp()
    return rank


def random_matrix(rows: int, columns: int, seed: int) -> Float[Tensor, "rows columns"]:
    """Independent normal entries of variance 1 / rows: on average it keeps the size of what it reads, per output."""
    generator = torch.Generator().manual_seed(seed)
    entries: Tensor = torch.randn(rows, columns, generator=generator) / rows**0.5
    return entries
