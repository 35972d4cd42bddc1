"""Singular values of many weight matrices, faster than a singular value decomposition of each and as exact.

The squares of the singular values of W are the eigenvalues of its smaller Gram matrix. Squaring costs digits: an
eigenvalue is exact to rounding times the largest one. In float64 that leaves a singular value 1e-6 times the largest
with four digits, where a float32 decomposition has none; smaller ones come out as less than 1e-7 of the largest.

Float32 takes half the time and is enough for the largest singular value, always (Lanczos steps find it without the
others), and for a function of all of them where none is small, as in matrices much longer than wide. Whether it was
enough is computed for each matrix, from the derivatives of the function (:meth:`Matrix.of_spectrum`); where it was not,
float64 is used. Square matrices nearly always have small singular values, so they go to float64 at once.

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

_FLOAT32_ERROR = 32 * 2.0**-24
"""Of an eigenvalue computed in float32, relative to the largest. Measured, not proven: at most 13 units (2**-24) in
the default model and in normal, positive, heavy-tailed, graded and low-rank matrices of 2 to 1,024 rows, 28 in
orthogonal ones."""

_FLOAT32_RANGE = (1e-12, 1e12)
"""Frobenius norms of matrices whose products neither vanish nor overflow in float32."""

_ENOUGH = 9e-5
"""Relative error bound up to which float32 is enough; 1e-4 is promised. Real errors are some hundred times smaller."""

_LINEAR = 16
"""A square counts as small if it is not this many times its error: derivatives no longer tell what an error does."""


_LANCZOS = 64
"""Rows from which the largest eigenvalue is found without the others."""


class Matrix:
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
    def largest(self) -> float:
        """The largest singular value."""
        gram = self._float32_gram()
        square = None if gram is None or len(gram) < _LANCZOS else _largest_eigenvalue(gram)
        return float(self.singular_values[0]) if square is None else square**0.5

    @cached_property
    def singular_values(self) -> Float[Tensor, " rank"]:
        """All singular values, largest first, float64."""
        return _eigenvalues(_gram(_flat(self.exact))).clamp_min(0).sqrt().flip(0).cpu()

    def of_spectrum(self, function: Callable[[Tensor], Tensor]) -> float:
        """A smooth function of the singular values (float64, largest first) with relative error below 1e-4.

        Eigenvalues of the Gram matrix in float32 are off by at most E, so a singular value s by E / 2s, and the
        function by the sum of its derivatives times that. All errors pulling the same way is the worst case, and real
        errors are far smaller.
        """
        short, long = sorted(self.weight.shape)
        squares = self._float32_squares if long >= 2 * short else None
        found = None if squares is None else _if_settled(function, squares)
        return float(function(self.singular_values)) if found is None else found

    def _float32_gram(self) -> np.ndarray | None:
        """The smaller Gram matrix in float32; None where it cannot be had."""
        low, high = _FLOAT32_RANGE
        if self.weight.device.type != "cpu" or min(self.weight.shape) < 2 or not low < self.frobenius < high:
            return None
        rows = _flat(self.weight).float().numpy()
        gram: np.ndarray = rows @ rows.T
        return gram

    @cached_property
    def _float32_squares(self) -> Float[Tensor, " rank"] | None:
        """Squared singular values, largest first, as exact as float32 has them; None if it cannot tell."""
        gram = self._float32_gram()
        if gram is None:
            return None
        from scipy.linalg import lapack

        work, _ = lapack.ssytrd_lwork(len(gram))
        _, diagonal, beside, _, _ = lapack.ssytrd(gram.T, lwork=int(work), overwrite_a=1)
        # The last step in float64: in float32 it would cost more digits than all before.
        squares, failed = lapack.dsterf(diagonal, beside)
        return None if failed else torch.from_numpy(squares).clamp_min(0).flip(0)

    def stream_basis(self, k: int) -> Float[Tensor, "stream k"]:
        """Orthonormal basis of the k strongest directions on the side of the residual stream."""
        side = self.exact.mT if self.writes else self.exact
        if side.shape[0] <= side.shape[1]:
            return _leading(_gram(side), k)
        basis: Tensor = torch.linalg.qr(side @ _leading(_gram(side.mT), k)).Q
        return basis


def _if_settled(function: Callable[[Tensor], Tensor], squares: Float[Tensor, " rank"]) -> float | None:
    """The function of the square roots, unless errors of float32 could matter to it."""
    error = _FLOAT32_ERROR * squares[0]
    with torch.enable_grad():
        values = squares.sqrt().requires_grad_()
        found = function(values)
    if not found.requires_grad:
        return None
    (slopes,) = torch.autograd.grad(found, values)
    used = slopes != 0
    if not bool((squares[used] > _LINEAR * error).all()):
        return None
    values, found = values.detach(), found.detach()
    bound = (slopes[used].abs() * error / (2 * values[used])).sum()
    return float(found) if bool(bound <= _ENOUGH * found.abs()) else None


def _flat(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "short long"]:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _gram(side: Float[Tensor, "short long"]) -> Float[Tensor, "short short"]:
    if side.device.type == "cpu":
        # numpy sees the same matrix twice and computes one half only.
        rows = side.numpy()
        return torch.from_numpy(rows @ rows.T)
    return side @ side.mT


def _largest_eigenvalue(gram: np.ndarray) -> float | None:
    """By Lanczos steps from a fixed random vector, to 1e-6; None if they do not get there."""
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    start = np.random.default_rng(0).standard_normal(len(gram)).astype(gram.dtype)
    try:
        (value,) = eigsh(gram, k=1, which="LA", v0=start, tol=1e-6, return_eigenvectors=False)
    except ArpackNoConvergence:
        return None
    return float(value)


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


def side_by_side(function: Callable[[_S], _T], items: Iterable[_S]) -> Iterator[_T]:
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


def random_matrix(rows: int, columns: int, seed: int) -> Float[Tensor, "rows columns"]:
    """Independent normal entries of variance 1 / rows: on average it keeps the size of what it reads, per output."""
    generator = torch.Generator().manual_seed(seed)
    entries: Tensor = torch.randn(rows, columns, generator=generator) / rows**0.5
    return entries
