"""The blocks of the README that hold results: written by the commands above them, or compared with ``--check``."""

import argparse
import re
import shlex
import sys
from pathlib import Path

from typer.testing import CliRunner

from tl_headmaps.cli.app import app

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"```console\n\$ tl-headmaps (?P<command>[^\n]*)\n(?P<output>.*?)```", re.S)


def output_of(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    if result.exit_code:
        raise SystemExit(f"tl-headmaps {command} failed: {result.output}{result.exception}")
    return result.stdout.rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a block would change")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    written = BLOCK.sub(
        lambda match: f"```console\n$ tl-headmaps {match['command']}\n{output_of(match['command'])}```", text
    )
    changed = written != text
    if check and changed:
        sys.exit("README.md shows results that its commands no longer print; run 'make figures'.")
    if changed:
        README.write_text(written, encoding="utf-8")
    print(f"{len(BLOCK.findall(text))} blocks, {'rewritten' if changed else 'unchanged'}")


if __name__ == "__main__":
    main()
