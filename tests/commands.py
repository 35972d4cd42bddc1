"""Running commands in tests: what a run left behind, and the command most of them use."""

import re
from dataclasses import dataclass

import click

from tl_headmaps.cli.app import app

COMMANDS = {name: app.get_command(click.Context(app), name) for name in app.list_commands(click.Context(app))}
"""All commands as click has them."""

GRID = ["grid", "--head", "L23H4", "--sources", "France,Germany,Egypt", "--targets", "Cairo,Paris,Berlin"]
GRID += ["--preset", "folded"]
CREATED = re.compile(rb'"created": "[^"]*"')


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str

    def assert_failed(self, code: int, *parts: str) -> None:
        """One sentence on stderr (click's own usage errors add a usage line), nothing like a traceback."""
        assert self.code == code, self
        assert "Traceback" not in self.err and self.out == ""
        for part in parts:
            assert part in self.err

    def assert_refused(self, code: int, *parts: str) -> None:
        self.assert_failed(code, *parts)
        assert self.err.startswith("tl-headmaps: ") and self.err.count("\n") == 1, self.err
