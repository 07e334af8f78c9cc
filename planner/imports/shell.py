"""Launch scripts and command lines as words, without running anything.

A script is read once from top to bottom: assignments (also of arrays), quotes, ``$NAME``, ``${NAME:-default}``,
``${NAME[@]}`` and whole-number arithmetic are followed; branches and loops are not, so every line counts as executed.
What only a shell could know (``$(…)``, backquotes, variables from outside) stays as it is written and is listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshplan.planner.imports.shell_words import MAX_WORD_LENGTH, MAX_WORDS, Word, refused, whole_number

# Of everything that a script expands to.
MAX_ALL_WORDS = 1_000_000
MAX_ALL_CHARACTERS = 2**24
MAX_DEFAULTS = 8  # ${A:-${B:-…}}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_BRACED = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*|[1-9][0-9]?)(?:\[(?P<which>[@*]|[0-9]{1,6})\])?"
    r"(?::?[-=](?P<default>.*)|:?[?].*)?",
    re.DOTALL,
)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_SBATCH = re.compile(r"^#SBATCH\s+(.+)$", re.MULTILINE)
_ENDS = frozenset("\n;|&()")
_BLANKS = frozenset(" \t\r")
_ALL_PARAMETERS = ("@", "*")
# Words after which a statement goes on: they change when it runs, not what it is.
_PREFIXES = frozenset(
    {"if", "then", "elif", "else", "while", "until", "do", "!", "{", "time", "exec", "export", "local", "readonly"}
    | {"declare", "nohup", "env", "sudo", "command"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One simple command.

    Args:
        line: where it begins, from 1 on.
        words: what the shell would hand to the program.
        num_hosts: pods that run it together, where a manifest says so.
        num_replicas: groups of such pods.
    """

    line: int
    words: tuple[str, ...]
    num_hosts: int = 1
    num_replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a text says.

    Args:
        statements: in order.
        batch_options: words of the ``#SBATCH`` lines.
        unknown: variables from outside and substitutions, as written.
        reassigned: variables that get several values; the last one before a use counts.
        defaults: variables from outside → the value that the script takes where they are unset.
    """

    statements: tuple[Statement, ...]
    batch_options: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    reassigned: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)


def read_script(text: str, variables: Mapping[str, str] | None = None) -> Script:
    """The statements of a bash script, a command line, or a file of flags.

    Args:
        text: what was written.
        variables: values of variables from outside.

    Raises:
        SpecError: an open quote or bracket, or a text that grows beyond what a command line can be.
    """
    reader = _Reader(text, dict(variables or {}))
    reader.read()
    options = tuple(word for line in _SBATCH.findall(text) for word in line.split(" #")[0].split())
    return Script(
        statements=tuple(reader.statements),
        batch_options=options,
        unknown=tuple(dict.fromkeys(reader.unknown)),
        reassigned=tuple(sorted(reader.reassigned)),
        defaults=reader.defaults,
    )


class _Reader:
    """One pass over a text."""

    def __init__(self, text: str, variables: dict[str, str], *, depth: int = 0) -> None:
        self.text, self.at, self.depth = text, 0, depth
        self.outside = frozenset(variables)
        self.scalars: dict[str, list[str]] = {name: [value] for name, value in variables.items()}
        self.statements: list[Statement] = []
        self.unknown: list[str] = []
        self.reassigned: set[str] = set()
        self.defaults: dict[str, str] = {}
        self.sizes = {name: len(value) for name, value in variables.items()}  # characters of each variable
        self.num_words = self.num_characters = 0
        self.line, self.line_at = 1, 0
        self.heredocs: list[str] = []

    def read(self) -> None:
        while self.at < len(self.text):
            self._statement()

    def _statement(self) -> None:
        words: list[str] = []
        line = 0
        while self.at < len(self.text):
            self._skip_blanks()
            sign = self.text[self.at : self.at + 1]
            if sign == "" or sign in _ENDS:
                self.at += 1
                if sign == "\n":
                    self._skip_heredocs()
                break
            if sign in "<>" and self.text[self.at + 1 : self.at + 2] != "(":
                if words and words[-1].isdigit() and self.text[self.at - 1].isdigit():
                    words.pop()  # the 2 of 2>&1 names a stream
                self._redirection()
                continue
            line = line or self._line()
            if not words and self._assignment():
                continue
            words += self._word()
            if len(words) > MAX_WORDS:
                raise refused(f"more than {MAX_WORDS} words")
            if len(words) == 1 and words[0] in _PREFIXES:
                words = []
        if words:
            self.statements.append(Statement(line=line, words=tuple(words)))

    def _line(self) -> int:
        """Number of the line that is being read."""
        self.line += self.text.count("\n", self.line_at, self.at)
        self.line_at = self.at
        return self.line

    def _skip_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in _BLANKS:
                self.at += 1
            elif self.text.startswith(("\\\n", "\\\r\n"), self.at):
                self.at = self.text.index("\n", self.at) + 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _redirection(self) -> None:
        found = _HEREDOC.match(self.text, self.at)
        if found is not None:
            self.heredocs.append(found[2])
            self.at = found.end()
            return
        while self.text[self.at : self.at + 1] in {"<", ">", "&"}:
            self.at += 1
        self._skip_blanks()
        if self.at < len(self.text) and self.text[self.at] not in _ENDS:
            self._word()

    def _skip_heredocs(self) -> None:
        names, self.heredocs = self.heredocs, []
        for name in names:
            end = re.compile(rf"^[ \t]*{name}[ \t\r]*$", re.MULTILINE).search(self.text, self.at)
            self.at = len(self.text) if end is None else end.end()

    def _assignment(self) -> bool:
        found = _ASSIGNMENT.match(self.text, self.at)
        if found is None:
            return False
        name, is_added = found[1], bool(found[2])
        self.at = found.end()
        is_array = self.text[self.at : self.at + 1] == "("
        if is_array:
            self.at += 1
            values = self._array(name)
        else:
            values = [" ".join(self._word(splits=False))]
        before = self.scalars.get(name)
        if name in self.outside:
            return True  # what the user says about it counts
        size = sum(map(len, values))
        if is_added and before is not None:
            size += self.sizes[name]
            if is_array:
                before.extend(values)
            else:
                before[:1] = ["".join(before[:1]) + values[0]]
            values = before
        elif not is_added and before is not None and before != values:
            self.reassigned.add(name)
        if size > MAX_WORD_LENGTH or len(values) > MAX_WORDS:
            raise refused(f"the variable {name} grows beyond {MAX_WORD_LENGTH} characters or {MAX_WORDS} words")
        self.scalars[name], self.sizes[name] = values, size
        return True

    def _array(self, name: str) -> list[str]:
        values: list[str] = []
        while True:
            self._skip_blanks()
            sign = self.text[self.at : self.at + 1]
            if sign == "":
                raise refused(f"the array {name}=( is never closed")
            if sign == "\n":
                self.at += 1
            elif sign == ")":
                self.at += 1
                return values
            elif sign in _ENDS or (sign in "<>" and self.text[self.at + 1 : self.at + 2] != "("):
                raise refused(f"the array {name}=( holds {sign!r}")
            else:
                values += self._word()
                if len(values) > MAX_WORDS:
                    raise refused(f"the array {name}=( holds more than {MAX_WORDS} words")

    def _word(self, *, splits: bool = True) -> list[str]:
        """The fields of one word; an unquoted variable may make several, or none."""
        word = Word()
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign in "<>" and self.text.startswith("(", self.at + 1):
                word.split(self._process(self.at))
                continue
            if sign in _BLANKS or sign in _ENDS or sign in "<>":
                break
            self.at += 1
            if sign == "'":
                word.add(self._until("'"))
            elif sign == '"':
                self._quoted(word)
            elif sign == "\\":
                following = self.text[self.at : self.at + 1]
                self.at += 1
                if following != "\n":
                    word.add(following)
            elif sign in "$`":
                values = self._expansion(sign)
                pieces = [piece for value in values for piece in value.split()] if splits else [" ".join(values)]
                word.split(pieces)
            else:
                word.add(sign)
        word.close()
        self.num_words += len(word.fields)
        self.num_characters += sum(map(len, word.fields))
        if self.num_words > MAX_ALL_WORDS or self.num_characters > MAX_ALL_CHARACTERS:
            raise refused(f"the script grows beyond {MAX_ALL_WORDS} words or {MAX_ALL_CHARACTERS} characters")
        return word.fields

    def _process(self, start: int) -> list[str]:
        """A process in the place of a file, ``<(…)``: only a shell knows its name."""
        self.at = start + 1
        self._skip_substitution()
        return self._unknown(start)

    def _quoted(self, word: Word) -> None:
        is_nothing = False  # "${NAME[@]}" of an empty array is no word at all, unlike ""
        while self.at < len(self.text):
            sign = self.text[self.at]
            self.at += 1
            if sign == '"':
                if not is_nothing:
                    word.add("")
                return
            if sign == "\\" and self.text[self.at : self.at + 1] in {'"', "\\", "$", "`", "\n"}:
                following = self.text[self.at]
                self.at += 1
                word.add("" if following == "\n" else following)
            elif sign in "$`":
                values = self._expansion(sign)
                is_nothing = is_nothing or not values
                word.split(values)
            else:
                word.add(sign)
        raise refused('a quote (") is never closed')

    def _until(self, end: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            raise refused(f"a quote ({end}) is never closed")
        found = self.text[self.at : stop]
        self.at = stop + len(end)
        return found

    def _expansion(self, sign: str) -> list[str]:
        """The values of ``$…``; as it is written where only a shell knows."""
        start = self.at - 1
        if sign == "`":
            self._until("`")
            return self._unknown(start)
        if self.text.startswith("((", self.at):
            return self._arithmetic(start)
        if self.text.startswith("(", self.at):
            self._skip_substitution()
            return self._unknown(start)
        if self.text.startswith("{", self.at):
            self.at += 1
            return self._braced(start, self._body())
        found = _NAME.match(self.text, self.at)
        if found is None:
            return self._parameter(start)
        self.at = found.end()
        # A bare $NAME of an array is its first word.
        return (self.scalars[found[0]][:1] or [""]) if found[0] in self.scalars else self._unknown(start)

    def _parameter(self, start: int) -> list[str]:
        """``$1``, ``$@``, ``$?``: what the script is called with, or what only a shell knows."""
        name = self.text[self.at : self.at + 1]
        if not name or name not in "0123456789@#*?$!-":
            return ["$"]
        self.at += 1
        if name in self.scalars:
            return self.scalars[name]
        unknown = self._unknown(start)
        return [] if name in _ALL_PARAMETERS else unknown  # a script that is called with none has none

    def _braced(self, start: int, body: str) -> list[str]:
        found = _BRACED.fullmatch(body)
        if found is None:
            unknown = self._unknown(start)
            return [] if body[:1] in _ALL_PARAMETERS else unknown
        if found["name"] in self.scalars:
            values = self.scalars[found["name"]]
            if found["which"] in {"@", "*"}:
                return values
            first = int(found["which"] or 0)
            return values[first : first + 1] or [""]
        default = None if found["default"] is None else self._default(found["default"])
        if default is None:
            return self._unknown(start)
        self.defaults[found["name"]] = default
        return [default]

    def _body(self) -> str:
        """What stands between the braces of ``${…}``, with the braces inside."""
        start, depth = self.at, 1
        while depth:
            sign = self.text[self.at : self.at + 1]
            if not sign:
                raise refused("a quote (}) is never closed")
            depth += {"{": 1, "}": -1}.get(sign, 0)
            self.at += 1
        return self.text[start : self.at - 1]

    def _default(self, text: str) -> str | None:
        """The text behind ``:-`` with its own variables; None where only a shell knows."""
        if "$" not in text and "`" not in text:
            return text.strip("\"'")
        if self.depth >= MAX_DEFAULTS:
            return None
        inner = _Reader(text, {}, depth=self.depth + 1)
        inner.scalars, inner.sizes, inner.defaults = self.scalars, self.sizes, self.defaults
        fields = inner._word(splits=False)
        return " ".join(fields) if not inner.unknown and inner.at == len(text) else None

    def _arithmetic(self, start: int) -> list[str]:
        end = self.text.find("))", self.at)
        if end < 0:
            raise refused("$(( is never closed")
        # A bracket of the expression may touch the closing ones: $((A*(B+1))).
        while self.text.startswith(")))", end):
            end += 1
        expression = self.text[self.at + 2 : end]
        self.at = end + 2
        named = {name: self.scalars.get(name) for name in _NAME.findall(expression)}
        known = {name: values[0] for name, values in named.items() if values}
        value = whole_number(expression, known)
        return self._unknown(start) if value is None else [str(value)]

    def _skip_substitution(self) -> None:
        depth = 0
        while self.at < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
            self.at += 1
            if depth == 0:
                return
        raise refused("$( is never closed")

    def _unknown(self, start: int) -> list[str]:
        written = self.text[start : self.at]
        self.unknown.append(written)
        # One field, whatever blanks it holds: nobody knows what the shell would make of it.
        return ["".join(written.split())]
