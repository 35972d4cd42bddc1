"""BibTeX of this tool and of the published methods behind its results.

A result class names the methods it stands on (``methods``, by the keys below); :func:`cite` prints their entries.
"""

import sys
from typing import Any

from .errors import UsageError
from .provenance import package_versions

HOSTS = ("nanda2022transformerlens",)
"""Cited with every result."""

_TOOL = """@software{{tl_headmaps,
  title = {{tl\\_headmaps: what every attention head of a TransformerLens model does}},
  author = {{{{The tl\\_headmaps authors}}}},
  year = {{2026}},
  version = {{{version}}}
}}"""

PUBLICATIONS = {
    "nanda2022transformerlens": """@misc{nanda2022transformerlens,
  title = {TransformerLens},
  author = {Neel Nanda and Joseph Bloom},
  year = {2022},
  howpublished = {\\url{https://github.com/TransformerLensOrg/TransformerLens}}
}""",
    "elhelo2024maps": """@misc{elhelo2024maps,
  title = {Inferring Functionality of Attention Heads from their Parameters},
  author = {Amit Elhelo and Mor Geva},
  year = {2024},
  eprint = {2412.11965},
  archivePrefix = {arXiv}
}""",
    "elhage2021framework": """@article{elhage2021framework,
  title = {A Mathematical Framework for Transformer Circuits},
  author = {Nelson Elhage and Neel Nanda and Catherine Olsson and others},
  year = {2021},
  journal = {Transformer Circuits Thread},
  url = {https://transformer-circuits.pub/2021/framework/index.html}
}""",
    "olsson2022induction": """@article{olsson2022induction,
  title = {In-context Learning and Induction Heads},
  author = {Catherine Olsson and Nelson Elhage and Neel Nanda and others},
  year = {2022},
  journal = {Transformer Circuits Thread},
  url = {https://transformer-circuits.pub/2022/in-context-learning-and-induction-heads/index.html}
}""",
    "ma2025cognitive": """@inproceedings{ma2025cognitive,
  title = {Cognitive Mirrors: Exploring the Diverse Functional Roles of Attention Heads in LLM Reasoning},
  author = {Xueqi Ma and Jun Wang and Yanbei Jiang and Sarah Monazam Erfani and Tongliang Liu and James Bailey},
  year = {2025},
  booktitle = {Advances in Neural Information Processing Systems},
  eprint = {2512.10978},
  archivePrefix = {arXiv}
}""",
    "benjamini1995controlling": """@article{benjamini1995controlling,
  title = {Controlling the False Discovery Rate: A Practical and Powerful Approach to Multiple Testing},
  author = {Yoav Benjamini and Yosef Hochberg},
  year = {1995},
  journal = {Journal of the Royal Statistical Society: Series B},
  volume = {57},
  number = {1},
  pages = {289--300}
}""",
    "wilson1927probable": """@article{wilson1927probable,
  title = {Probable Inference, the Law of Succession, and Statistical Inference},
  author = {Edwin B. Wilson},
  year = {1927},
  journal = {Journal of the American Statistical Association},
  volume = {22},
  number = {158},
  pages = {209--212}
}""",
    "newman2006modularity": """@article{newman2006modularity,
  title = {Modularity and community structure in networks},
  author = {Mark E. J. Newman},
  year = {2006},
  journal = {Proceedings of the National Academy of Sciences},
  volume = {103},
  number = {23},
  pages = {8577--8582}
}""",
    "vonluxburg2007tutorial": """@article{vonluxburg2007tutorial,
  title = {A tutorial on spectral clustering},
  author = {Ulrike von Luxburg},
  year = {2007},
  journal = {Statistics and Computing},
  volume = {17},
  number = {4},
  pages = {395--416}
}""",
    "molchanov2019importance": """@inproceedings{molchanov2019importance,
  title = {Importance Estimation for Neural Network Pruning},
  author = {Pavlo Molchanov and Arun Mallya and Stephen Tyree and Iuri Frosio and Jan Kautz},
  year = {2019},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition}
}""",
    "rudelson2007sampling": """@article{rudelson2007sampling,
  title = {Sampling from large matrices: An approach through geometric functional analysis},
  author = {Mark Rudelson and Roman Vershynin},
  year = {2007},
  journal = {Journal of the ACM},
  volume = {54},
  number = {4}
}""",
    "roy2007effective": """@inproceedings{roy2007effective,
  title = {The effective rank: A measure of effective dimensionality},
  author = {Olivier Roy and Martin Vetterli},
  year = {2007},
  booktitle = {European Signal Processing Conference}
}""",
    "hill1975simple": """@article{hill1975simple,
  title = {A Simple General Approach to Inference About the Tail of a Distribution},
  author = {Bruce M. Hill},
  year = {1975},
  journal = {The Annals of Statistics},
  volume = {3},
  number = {5},
  pages = {1163--1174}
}""",
}


def bibtex(keys: tuple[str, ...] = ()) -> str:
    """Entries of this tool, of its host and of some publications, each once."""
    entries = [_TOOL.format(version=package_versions()["tl-headmaps"])]
    entries += [PUBLICATIONS[key] for key in dict.fromkeys((*HOSTS, *keys))]
    return "\n\n".join(entries)


def cite(result: Any = None, *, file: Any = None) -> None:
    """Print BibTeX of this tool, of TransformerLens, and of the methods used in a result.

    Args:
        result: A result, whose methods are cited too; without one, the tool and its host alone.
        file: Any text stream to print to; standard output by default.

    Example:
        >>> from tl_headmaps import ValueMixing
        >>> cite(ValueMixing.from_arrays([[1, 0], [0.5, 0.5]], [[1.0], [2.0]]))  # doctest: +ELLIPSIS
        @software{tl_headmaps,
        ...
        @misc{nanda2022transformerlens,
        ...
        @article{elhage2021framework,
        ...
    """
    methods = () if result is None else getattr(result, "references", None)
    if methods is None:
        raise UsageError(
            f"cite() takes a result of an analysis (or nothing), not a {type(result).__name__}. A saved one is read "
            "with Result.load(path)."
        )
    (sys.stdout if file is None else file).write(bibtex(methods) + "\n")
