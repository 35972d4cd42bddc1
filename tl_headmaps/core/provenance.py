"""What made a result: the model and its fingerprint, the weight basis, versions, options, seed."""

import platform
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_MAKERS = ("tl-headmaps", "transformer-lens", "torch")
_RECORDED_PACKAGES = ("tl-headmaps", "transformer-lens", "torch", "transformers", "numpy")


_OF_SOME_MODELS = ("mixers", "heads", "notes", "quantisation")


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _RECORDED_PACKAGES}


# Looking one up parses the package's whole metadata, and a process imports one version only.
@cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Provenance:
    """How a result was made; saved with it, and compared when results are combined.

    Attributes:
        model: Name or folder the model was loaded from.
        fingerprint: The model: SHA-256 over embeddings, first MLP, and attention and norms of every layer, the same for
            all analyses (:attr:`HeadWeights.fingerprint`); of given arrays, SHA-256 over them.
        architecture: Class of the underlying model.
        basis: Whether the weights were raw, folded or centred when they were read.
        dtype: Stored type of the weights and the type computed in.
        device: Where it was computed.
        options: Every option of the call that can change a number.
        data: SHA-256 of what else was read: data files, and parts of the model that the fingerprint leaves out
            (``parameters``: all of them, where the model was run; ``mlp_weights``).
        seed: Seed of anything random, None if nothing was.
        mixers: What mixes the tokens of layers that have no heads (hybrid models), by layer.
        heads: Number of heads of each layer that has any, where layers differ.
        notes: What to know when reading numbers of this model, such as a gate that maps of the weights leave out.
        quantisation: What the weights were before they were numbers, such as ``"Q4_1, dequantised"``; None if they do
            not show that they were quantised.
        seams: Where the model was run to check what was read of it: what fits, by seam (``tl-headmaps model``).
        versions: Versions of the packages involved.
        created: UTC time; the only part that differs between two identical runs.

    Example:
        >>> from tl_headmaps import Provenance, load_default_model, token_grid
        >>> provenance = token_grid(load_default_model(), "L23H4", ["France"], ["Paris"]).provenance
        >>> provenance.basis, provenance.options["preset"], len(provenance.fingerprint)
        ('raw', 'context', 64)
        >>> Provenance.from_dict(provenance.to_dict()) == provenance
        True
    """

    model: str
    fingerprint: str
    architecture: str
    basis: str
    dtype: str
    device: str
    options: dict[str, Any] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    seed: int | None = None
    mixers: dict[str, str] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    quantisation: str | None = None
    seams: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=package_versions)
    created: str = field(default_factory=_now)

    @classmethod
    def of_arrays(cls, digest: str, dtype: Any, **details: Any) -> "Provenance":
        """Provenance of a result computed from arrays of the caller, without a model."""
        return cls("given arrays", digest, "none", "none", str(dtype).removeprefix("torch."), "cpu", **details)

    def __str__(self) -> str:
        """A line for each field that is not empty."""
        lines = []
        for name, value in self.to_dict().items():
            if isinstance(value, dict):
                value = ", ".join(f"{key}={entry}" for key, entry in value.items())
            if isinstance(value, list):
                value = " ".join(value)
            if value not in (None, ""):
                lines.append(f"{name + ':':<14}{value}")
        return "\n".join(lines)

    @property
    def short_rows(self) -> dict[str, str | int]:
        """Rows of a head map that have fewer cells than others: how many, or what layers have instead of heads."""
        return {**self.heads, **self.mixers}

    @property
    def caption(self) -> str:
        """What figures say about the model under them: that its weights were quantised, if they were."""
        return "" if self.quantisation is None else f"{self.model}: weights {self.quantisation}."

    @property
    def line(self) -> str:
        """One line for papers and the metadata of files; without the time, so that equal results have equal files.

        Example:
            >>> Provenance("tiny", "0123456789abcdef", "Tiny", "raw", "float32", "cpu", {"preset": "maps"}, seed=3).line
            'Made from tiny (fingerprint 0123456789ab), preset=maps, seed=3 with tl-headmaps ..., torch ...'
        """
        options = {name: value for name, value in self.options.items() if isinstance(value, str | int | float)}
        if self.seed is not None:
            options["seed"] = self.seed
        told = "".join(f", {name}={value}" for name, value in options.items())
        versions = ", ".join(f"{name} {self.versions[name]}" for name in _MAKERS if name in self.versions)
        return f"Made from {self.model} (fingerprint {self.fingerprint[:12]}){told} with {versions}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows for ``result.provenance``."""
        printer.text(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON; what only some models have is left out for the others."""
        return {name: value for name, value in asdict(self).items() if value or name not in _OF_SOME_MODELS}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Provenance":
        """Inverse of :meth:`to_dict`; unknown fields of newer versions are dropped."""
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
