"""Words of a shell script: those of bash, read and never run."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.errors import SpecError
from meshplan.planner.imports.command import read_inputs
from meshplan.planner.imports.shell import read_script
from meshplan.planner.imports.shell_words import whole_number


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize(
    "line",
    [
        """A=1; B="x y"; say $A "$B" $B '$A' "a\\"b" c\\ d""",
        """L=(one "two three" four); say "${L[@]}" ${L[0]}""",
        """N=4; G=8; say $((N*G)) $(( (N+1)*G ))  $((N*(G-2)))""",
        """say ${UNSET:-fallback} "${UNSET:-two words}" # a comment""",
        """A=1 say tail \\\n  more""",
        """A="--x 1"; A+=" --y 2"; say $A""",
        """L=(); L+=(--x 1); L+=(--y); say "${L[@]}" $L""",
        """L=(one); L+=(two); L+=3; L+=(); say "${L[@]}" $L""",
        """L=one; L+=(two three); say "${L[@]}" $L""",
        """L=(); say "${L[@]}" $L end; L+=x; say "${L[@]}" """,
        """say a && say b; say c | cat""",
        """say 2>/dev/null one""",
        """say x=$((7%4))y pre"mid"'post'""",
    ],
)
def test_words_are_those_of_bash(line: str) -> None:
    shell = 'say() { printf "%s\\0" "$@" >&3; printf "\\1" >&3; }\n'
    done = subprocess.run(
        ["bash", "-c", shell + "{\n" + line + "\n} 3>&1 >/dev/null"], capture_output=True, check=True, text=True
    )
    theirs = sorted(tuple(call.split("\0")[:-1]) for call in done.stdout.split("\1")[:-1])
    ours = sorted(one.words[1:] for one in read_script(line).statements if one.words[0] == "say")
    assert ours == theirs


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = f"$(touch {mark})`touch {mark}`"
    text = (
        f"X={evil}\ntorchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 "
        f'--data-path "{evil}" --seq-length 4096 ; touch {mark}\n'
    )
    (tmp_path / "train.sh").write_text(text)
    found = read_inputs([str(tmp_path / "train.sh")])
    assert not mark.exists()
    assert any("touch" in word for word in found.unread)


@pytest.mark.parametrize("alphabet", [None, "$(){}\"'\\`A=1+* \n;#[@]<&|"], ids=["any", "shell signs"])
@given(data=st.data())
def test_any_text_is_read_or_refused(alphabet: str | None, data: st.DataObject) -> None:
    """No other error, and never an endless loop."""
    text = data.draw(st.text(max_size=200) if alphabet is None else st.text(alphabet=alphabet, max_size=120))
    with contextlib.suppress(SpecError):
        read_script(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchrun 'x", "quote"),
        ('torchrun "x', "quote"),
        ("A=(1 2", "never closed"),
        ("say $((1", "never closed"),
        ("say $(ls", "never closed"),
        ("A=x\n" + "A=$A$A\n" * 40, "grows beyond"),
    ],
)
def test_broken_scripts_are_named(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_script(text)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2*(3+4)", 14), ("A/2", 4), ("__import__('os')", None), ("9**9**9", None), ("1/0", None), ("A.real", None)],
)
def test_shell_arithmetic_is_evaluated_or_left_unknown(expression: str, value: int | None) -> None:
    assert whole_number(expression, {"A": "8"}) == value
