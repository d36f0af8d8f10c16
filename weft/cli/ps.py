"""The verb `ps`: the models that a running server has in memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from weft.cli.ctl.run import DEFAULT_URL, ctl
from weft.config.options import SettingsError, asked_help

ABOUT = "The models that a running server has in memory, with their requests."


class _PsParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"weft ps: {message.removeprefix('argument ')} (weft ps --help)")


def ps(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises SettingsError if there is no server."""
    parser = _PsParser(prog="weft ps", description=ABOUT, allow_abbrev=False, add_help=False)
    parser.add_argument("--url", help=f"the server; without it WEFT_URL, or {DEFAULT_URL}")
    parser.add_argument("--admin-key", help="its key; without it WEFT_ADMIN_API_KEY")
    parser.add_argument("--all", action="store_true", help="also models that are not loaded")
    parser.add_argument("--json", action="store_true", help="the answer as it is")
    if asked_help(argv) is not None:
        print(parser.format_help().rstrip())
        return 0
    asked = parser.parse_args(list(argv))
    words = ["models", "list" if asked.all else "loaded"]
    if asked.url:
        words += ["--url", asked.url]
    if asked.admin_key:
        words += ["--admin-key", asked.admin_key]
    return ctl([*words, "--json"] if asked.json else words)
