"""Spec files to plain data: what is read, and everything hostile that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.untrusted.limits import MAX_ALIASES, MAX_DEPTH, MAX_YAML_BYTES
from meshplan.planner.core.plan import digest
from meshplan.planner.core.reading.documents import parse_document, read_document

TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"]) | st.sampled_from("\n\t"))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e12", 1e12),
        ("1.5e3", 1500.0),
        ("-2", -2),
        ("007", 7),
        (".5", 0.5),
        ("1:30", "1:30"),
        ("2026-11-21", "2026-11-21"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("yes", True),
        ("null", None),
        ("80 GiB", "80 GiB"),
    ],
)
def test_scalars_are_read_as_in_yaml_1_2(text: str, value: object) -> None:
    read = parse_document(f"a: {text}")["a"]
    assert read == value
    assert type(read) is type(value)


def test_a_list_and_a_key_without_a_value_are_no_decimals() -> None:
    assert parse_document("a: [2,5]\nb: {c: 2, d}\nf: {2b: ~, 5c}\n") == {
        "a": [2, 5],
        "b": {"c": 2, "d": None},
        "f": {"2b": None, "5c": None},
    }


@given(st.dictionaries(TEXTS, JSON_VALUES, max_size=4))
@settings(max_examples=60, deadline=None)
def test_json_comes_back_as_it_was(document: dict[str, object]) -> None:
    assert parse_document(json.dumps(document), is_json=True) == document


def test_yaml_and_json_of_one_question_have_one_digest() -> None:
    yaml_text = "kind: training\nworkload: {sequence_length: 4096, num_training_tokens: 1e12}\n"
    json_text = '{"kind": "training", "workload": {"sequence_length": 4096, "num_training_tokens": 1e12}}'
    assert digest(parse_document(yaml_text)) == digest(parse_document(json_text, is_json=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2\n", "'a' appears twice"),
        ("a: {b: 1, c: {d: 1, d: 2}}\n", "'d' appears twice"),
        ("a: 1\nslo: {ttft_p99_s: 2,5}\n", r"line 2: ttft_p99_s: a comma .* a decimal has a point: 2\.5$"),
        ("a: {ttft: 2,05 s, itl: 3,5}", r"ttft: a comma .* a decimal has a point: 2\.05 s$"),
        ("a: {rate: 2,500}", "rate: a comma .* thousands have no comma: 2500$"),
        ("a: {b: 2, [5]}", "not YAML"),
        ("a: .nan", "a is nan, which JSON cannot express; give a finite number"),
        ("a: [1, {b: .inf}]", r"a\[1\]\.b is inf, which JSON cannot express"),
        ("a: 1e999", "JSON cannot express"),
        ('a: "\\ud800"', "JSON cannot express|invalid Unicode"),
        ("a: &x [*x]", "JSON cannot express"),
        ("a: {1: 2}", "not text"),
        ("1: 2", "not text"),
        ("a: [[{true: 2}]]", "not text"),
        ("a: !!bool nonsense", "tag"),
        ("a: !!timestamp nonsense", "tag"),
        ("a: !!binary aGVsbG8=", "tag"),
        ("a: !!python/object/apply:os.system [ls]", "tag"),
        ("a: !Ref x", "tag"),
        ("a: [", "not YAML"),
        ("a: b: c", "not YAML"),
        ("\x00", "not YAML"),
        ("- a", "must hold a mapping such as 'kind: training', not a list"),
        (".nan", "spec is nan, which JSON cannot express"),
        ("", "must hold a mapping such as 'kind: training', and is empty"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "deeper"),
        ("a: " + "9" * 5000, "not YAML"),
    ],
)
def test_hostile_yaml_is_refused_with_its_reason(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_document(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "not a number"),
        ('{"a": 1e999}', "JSON cannot express"),
        ('{"a": "\\ud800"}', "JSON cannot express"),
        ("[1, 2]", "must hold a mapping"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
        ('{"a": 1', "not JSON"),
    ],
)
def test_hostile_json_is_refused_with_its_reason(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_document(text, is_json=True)


def test_a_million_aliases_are_refused_before_they_expand() -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 2)}]\n" for n in range(1, 60))
    with pytest.raises(SpecError, match=f"aliases add|more than {MAX_ALIASES} aliases"):
        parse_document(f"l0: &l0 [x]\n{levels}")
    with pytest.raises(SpecError, match="aliases"):
        parse_document("a: &a 1\nb: [" + "*a, " * 150_000 + "]")


def test_a_kilobyte_of_allowed_aliases_does_not_grow_to_gigabytes() -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 11))
    with pytest.raises(SpecError, match="its aliases add"):
        parse_document(f"l0: &l0 {'x' * 50}\n{levels}")


@pytest.mark.parametrize("sign", ["\x1b[2J", "\x07", "\x9b31m", "\u202e", "\u2028", "\x7f"])
def test_control_characters_are_refused_with_their_place(sign: str) -> None:
    for document in ({"a": [{"b": f"x{sign}"}]}, {"a": {f"b{sign}": 1}}):
        with pytest.raises(SpecError, match=r"a.*b.*control character \\u") as caught:
            parse_document(json.dumps(document), is_json=True)
        assert sign[0] not in str(caught.value)
    assert parse_document(json.dumps({"a": "back\\u001bslash\n\t"}), is_json=True)


def test_windows_line_ends_are_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"\xef\xbb\xbfkind: training\r\ntext: |\r\n  two\r\n  lines\r\n")
    assert read_document(path) == {"kind": "training", "text": "two\nlines\n"}


def test_few_aliases_and_merges_are_fine() -> None:
    assert parse_document("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n") == {
        "a": {"x": 1},
        "b": {"x": 1},
        "c": {"x": 1, "y": 2},
    }


def test_a_syntax_error_is_one_line_with_its_place() -> None:
    with pytest.raises(SpecError, match="reads: line 2, column 3: mapping values are not allowed in this context"):
        parse_document("a: b\n c: [\n", name="a.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read"):
        read_document(tmp_path / "missing.yaml")
    with pytest.raises(SpecError, match="is a folder"):
        read_document(tmp_path)
    aliases = tmp_path / "aliases.yaml"
    aliases.write_text("a: &a 1\nb: [" + "*a, " * 1_000_000 + "]")
    with pytest.raises(SpecError, match="at most"):
        read_document(aliases)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SpecError, match="cannot read"):
        read_document(binary)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"kind: training\nmodel: caf\xe9\n")
    with pytest.raises(SpecError, match=r"latin.yaml: it is not UTF-8: byte 0xe9 in line 2, column 11; save it"):
        read_document(latin)
    large = tmp_path / "large.yaml"
    large.write_text("a: 1\n" + "#" * MAX_YAML_BYTES)
    with pytest.raises(SpecError, match="at most"):
        read_document(large)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text('{"kind": "training"}', encoding="utf-8-sig")
    assert read_document(path) == {"kind": "training"}


@given(st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_text_raises_anything_but_a_spec_error(text: str) -> None:
    for is_json in (False, True):
        try:
            document = parse_document(text, is_json=is_json)
        except SpecError:
            continue
        digest(document)


@given(st.lists(st.sampled_from(list("{}[]:,&*!|>-?'\"#%@ \n\tab01.~=<")), max_size=60).map("".join))
@settings(max_examples=400, deadline=None)
def test_no_yaml_punctuation_raises_anything_but_a_spec_error(text: str) -> None:
    try:
        document = parse_document(text)
    except SpecError:
        return
    digest(document)
