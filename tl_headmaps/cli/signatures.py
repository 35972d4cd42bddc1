"""What a function takes, read from its source with ``ast``: names, types, defaults, and their lines in ``Args:``.

Nothing is imported, so a help page costs no torch. Types that are aliases are followed to the module that defines them.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from ..core.options import args_of

PACKAGE = Path(__file__).parents[1]

REQUIRED = object()
"""Default of a parameter that has none."""

_Definition: TypeAlias = ast.AST | tuple[Path, str] | None
"""What a name stands for in a module: a definition, a value, or a name of another module of the package."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function.

    Attributes:
        name: Its name.
        types: Names in its annotation, None among them: what aliases stand for, and of ranges their own name, too.
        choices: Strings of the ``Literal`` in its annotation.
        default: Its default, ``REQUIRED`` without one; None also for a default that only a running program knows.
        doc: Its text in ``Args:``, or that of all calls.
    """

    name: str
    types: frozenset[str]
    choices: tuple[str, ...]
    default: Any
    doc: str


class Signature:
    """A function of the package, as its source describes it.

    Example:
        >>> groups = Signature.of_call("attention_groups")
        >>> groups.parameters["combine"].choices, groups.parameters["drop_sink"].default
        (('mean', 'max'), True)
    """

    def __init__(self, module: Path, name: str) -> None:
        while (node := _function(module, name)) is None:
            origin = _names(module, True).get(name)
            assert isinstance(origin, tuple), f"{name} is not a function of {module}"
            module, name = origin
        self.module = module
        self._arguments = node.args
        self._doc = ast.get_docstring(node) or ""

    @classmethod
    def of_call(cls, name: str) -> "Signature":
        """A public call, wherever ``__init__.pyi`` says it is."""
        return cls(PACKAGE / "__init__.pyi", name)

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return plain(self._doc.partition("\n")[0])

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """All parameters by name, in their order."""
        arguments = list(_with_defaults(self._arguments))
        docs = args_of(self._doc, [argument.arg for argument, _ in arguments])
        found = {}
        for argument, default in arguments:
            parts = list(_parts(self.module, argument.annotation))
            types = [part for part in parts if isinstance(part, ast.Name) or part.value is None]
            found[argument.arg] = Parameter(
                argument.arg,
                frozenset(part.id if isinstance(part, ast.Name) else "None" for part in types),
                tuple(str(part.value) for part in parts if isinstance(part, ast.Constant) and part not in types),
                default if default is REQUIRED else _value(self.module, default),
                docs.get(argument.arg, ""),
            )
        return found


def plain(text: str) -> str:
    """Text of a docstring without its markup, with options as the command line writes them.

    Example:
        >>> plain('``"ov"``, or with ``preset="maps"`` as :func:`relation_scores` does')
        'ov, or with --preset maps as relation_scores does'
    """
    text = re.sub(r":\w+:`[~.]*(.*?)`", r"\1", text)
    text = re.sub(r'``(\w+)="(\w+)"``', r"--\1 \2", text)
    return re.sub(r'``"(.*?)"``|``(.*?)``', r"\1\2", text)


def _function(module: Path, name: str) -> ast.FunctionDef | None:
    """A function of a module; of overloads, what they are overloads of. Only its own lines are parsed: that is fast."""
    blocks = re.findall(rf"^def {name}\(.*?(?=^[@\w]|\Z)", _source(module), re.MULTILINE | re.DOTALL)
    node = ast.parse(blocks[-1]).body[0] if blocks else None
    return node if isinstance(node, ast.FunctionDef) else None


def _with_defaults(arguments: ast.arguments) -> Iterator[tuple[ast.arg, Any]]:
    n_required = len(arguments.args) - len(arguments.defaults)
    yield from zip(arguments.args, [REQUIRED] * n_required + arguments.defaults, strict=True)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument, REQUIRED if default is None else default


@lru_cache
def _source(module: Path) -> str:
    return module.read_text(encoding="utf-8")


@lru_cache
def _names(module: Path, whole: bool) -> dict[str, _Definition]:
    """What the imported and the assigned names of a module stand for; in its lines above all code, or in all."""
    found: dict[str, _Definition] = {}
    source = _source(module)
    for node in ast.parse(source if whole else re.split(r"^(?:@|class |def )", source, flags=re.MULTILINE)[0]).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            path = (node.module or "").split(".")
            if node.level or path[0] == PACKAGE.name:
                origin = _file((module.parents[node.level - 1] if node.level else PACKAGE.parent).joinpath(*path))
                found |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
    return found


def _file(module: Path) -> Path:
    return module / "__init__.py" if module.is_dir() else module.with_suffix(".py")


def _definition(module: Path, name: str) -> tuple[Path, _Definition]:
    """Where a name is defined, and as what; as None if it is a class, or comes from outside the package."""
    found = _names(module, False).get(name)
    if found is None and re.search(rf"^{name}\b", _source(module), re.MULTILINE):
        found = _names(module, True).get(name)
    return _definition(*found) if isinstance(found, tuple) else (module, found)


def _parts(module: Path, annotation: ast.AST | None) -> Iterator[ast.Name | ast.Constant]:
    """Names of types in an annotation, and the values of its Literal."""
    if isinstance(annotation, ast.Name):
        origin, meaning = _definition(module, annotation.id)
        parts = list(_parts(origin, meaning)) if isinstance(meaning, ast.expr) else []
        is_range = any(isinstance(part, ast.Name) and part.id == "Annotated" for part in parts)
        yield from [annotation, *parts] if is_range or not parts else parts
    elif isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        if annotation.value.id == "Literal":
            yield from (part for part in ast.walk(annotation.slice) if isinstance(part, ast.Constant))
            return
        # Of Annotated[int, AtLeast(1)] the type alone: what is called is no type.
        yield annotation.value
        yield from _parts(module, annotation.slice)
    elif isinstance(annotation, ast.Constant) and annotation.value is None:
        yield annotation
    elif isinstance(annotation, ast.BinOp | ast.Tuple | ast.List):
        for part in ast.iter_child_nodes(annotation):
            yield from _parts(module, part)


def _value(module: Path, default: ast.expr) -> Any:
    """The value of a default: a literal, or a constant with a name."""
    if isinstance(default, ast.Name):
        origin, meaning = _definition(module, default.id)
        return _value(origin, meaning) if isinstance(meaning, ast.expr) else None
    try:
        return ast.literal_eval(default)
    except ValueError:
        return None
