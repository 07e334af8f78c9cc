"""How text is written into each language so that it stays text: shell, comments, YAML, HTML, CSV, Markdown.

Every value that is written goes through here. TOML strings are JSON strings (``json.dumps``), as its grammar allows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import yaml

from meshplan.catalogs.untrusted.text import shown

# Signs that make a cell a formula in spreadsheets (OWASP, "CSV Injection").
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MARKDOWN_SIGNS = re.compile(r"([\\`|<>]|\](?=\())")


if TYPE_CHECKING:
    from yaml import SafeDumper

    QuickDumper = SafeDumper
else:  # the emitter in C needs a sixth of the time; what it writes reads the same, and is but for strange keys
    QuickDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class QuotingDumper(QuickDumper):
    """Quotes text that a reader of YAML 1.2 would take for a number, which PyYAML (1.1) writes plainly."""


QuotingDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"^(?:{_NUMBER.pattern})$"), list("-+.0123456789")
)


def shell_word(text: str) -> str:
    """One word of a shell; a line end in it stays in its quotes, other control characters are written out."""
    return shlex.quote(shown(text))


def comment_lines(lines: Sequence[str], sign: str = "#") -> str:
    r"""``lines`` as comments: a text of several lines is as many comments.

    >>> comment_lines(["one", "two\nlines"])
    '# one\n# two\n# lines\n'
    """
    return "".join(f"{sign} {part}\n" for line in lines for part in shown(line).splitlines() or [""])


def yaml_text(document: Any, *, all_documents: bool = False, **options: Any) -> str:
    r"""One YAML document, or several; ``options`` are those of ``yaml.dump``.

    >>> yaml_text({"region": "1e5"})
    "region: '1e5'\n"
    """
    dump = yaml.dump_all if all_documents else yaml.dump
    text: str = dump(document, Dumper=QuotingDumper, **{"sort_keys": False, **options})
    return text


def html_text(value: object) -> str:
    """Text of a page, or of an attribute in quotes."""
    return escape(shown(str(value)))


def csv_cell(value: Any) -> Any:
    """A cell of a CSV: text that a spreadsheet would run gets an apostrophe in front; numbers stay.

    >>> csv_cell("=1+1"), csv_cell("-5"), csv_cell(-5.0)
    ("'=1+1", '-5', -5.0)
    """
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def markdown_text(text: str) -> str:
    r"""Text on one line of a Markdown page, its signs escaped.

    >>> markdown_text("a|b\n<script>")
    'a\\|b \\<script\\>'
    """
    return _MARKDOWN_SIGNS.sub(r"\\\1", " ".join(shown(text).split()))
