"""Traces of requests: what is read, and what is said of a malformed file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from meshplan.catalogs.errors import SpecError
from meshplan.planner.serving.problem.trace import read_trace

HEAD = "arrival_s,input_length,output_length"


def written(folder: Path, text: str, *, compressed: bool = False) -> Path:
    path = folder / "trace.csv"
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_a_trace_is_read(tmp_path: Path, compressed: bool) -> None:
    requests = read_trace(written(tmp_path, f"{HEAD}\n0.0,100,5\n\n1.5,20,1\n", compressed=compressed))
    assert requests.arrival_s.tolist() == [0.0, 1.5]
    assert requests.input_length.tolist() == [100, 20]
    assert requests.output_length.tolist() == [5, 1]
    assert requests.prefix is requests.cached_tokens is requests.priority is None


@pytest.mark.parametrize("compressed", [False, True])
def test_json_lines_are_read(tmp_path: Path, compressed: bool) -> None:
    text = (
        '{"arrival_s": 0.0, "input_length": 100, "output_length": 5}\n\n'
        '{"input_length": 20, "arrival_s": 1.5, "output_length": 1}\n'
    )
    requests = read_trace(written(tmp_path, text, compressed=compressed))
    assert requests.arrival_s.tolist() == [0.0, 1.5]
    assert requests.input_length.tolist() == [100, 20]


FIRST = '{"arrival_s": 0, "input_length": 1, "output_length": 1}\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (FIRST + '{"arrival_s": 0, "input_length": 1}', "line 2: output_length is ''"),
        (FIRST + '{"arrival_s": 0, "output_length": 1, "more": 7}', "line 2: 4 values for 3 columns"),
        (FIRST + '{"arrival_s": 0, "input_length": 0, "output_length": 1}', "line 2: input_length is '0'"),
        (FIRST + '{"arrival_s": 0, "input_length": null, "output_length": 1}', "line 2: input_length is 'None'"),
        (FIRST + "0,1,1", "line 2 is no JSON object"),
        (FIRST + "[1]", "line 2 is no JSON object"),
        ('{"timestamp": 12, "input_length": 1, "output_length": 1}', "column 'timestamp': write arrival_s, in seconds"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "column 'ContextTokens': write input_length"),
    ],
)
def test_what_others_record_is_told_how_to_be_written(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SpecError) as refusal:
        read_trace(written(tmp_path, text))
    assert named in str(refusal.value)
    assert "is missing" not in str(refusal.value)


def test_columns_come_in_any_order(tmp_path: Path) -> None:
    text = "priority,cached_tokens,output_length,prefix,input_length,arrival_s\n-2,8,5,7,9,0\n1,0,6,-1,3,0\n"
    requests = read_trace(written(tmp_path, text))
    assert requests.priority is not None
    assert requests.cached_tokens is not None
    assert requests.prefix is not None
    assert requests.priority.tolist() == [-2, 1]
    assert requests.cached_tokens.tolist() == [8, 0]
    assert requests.prefix.tolist() == [7, -1]
    assert requests.output_length.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "line 1: column 'arrival_s' is missing"),
        (f"{HEAD}\n", "no requests"),
        (f"{HEAD},when\n", "unknown column 'when'"),
        (f"{HEAD},arrival_s\n", "column 'arrival_s' comes 2 times"),
        (f"{HEAD}\n0,1\n", "line 2: 2 values for 3 columns"),
        (f"{HEAD}\n0,1,1\n-1,1,1\n", "line 3: arrival_s is '-1': give a number of seconds, at least 0"),
        (f"{HEAD}\nnan,1,1\n", "line 2: arrival_s is 'nan'"),
        (f"{HEAD}\ninf,1,1\n", "line 2: arrival_s is 'inf'"),
        (f"{HEAD}\n5,1,1\n4,1,1\n", "line 3: arrival_s is 4, after 5 on the line before; sort by arrival"),
        (f"{HEAD}\n0,0,1\n", "line 2: input_length is '0': give a whole number, at least 1"),
        (f"{HEAD}\n0,1,0\n", "line 2: output_length is '0': give a whole number, at least 1"),
        (f"{HEAD}\n0,1.5,1\n", "line 2: input_length is '1.5'"),
        (f"{HEAD}\n0,{10**40},1\n", "line 2: input_length is"),
        (f"{HEAD},cached_tokens\n0,5,1,6\n", "line 2: cached_tokens is 6, more than the prompt's 5"),
    ],
)
def test_malformed_traces_are_refused_with_the_line(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_trace(written(tmp_path, text))
    assert named in str(caught.value)


ANSWERS = f"{HEAD},queued_s,scheduled_s,first_token_s,finished_s"


def test_times_of_the_recorded_server_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, f"{ANSWERS}\n0,9,5,0.25,0.5,1,3\n1,9,1,1,1,2,2\n")
    assert read_trace(path).answered is None
    answered = read_trace(path, with_answers=True).answered
    assert answered is not None
    columns = (answered.queued_s, answered.scheduled_s, answered.first_token_s, answered.finished_s)
    assert [None if column is None else column.tolist() for column in columns] == [
        [0.25, 1.0],
        [0.5, 1.0],
        [1.0, 2.0],
        [3.0, 2.0],
    ]


def test_a_load_generator_may_record_fewer_times_as_json_lines(tmp_path: Path) -> None:
    text = '{"finished_s": 2.5, "arrival_s": 0.5, "input_length": 9, "output_length": 5}\n'
    answered = read_trace(written(tmp_path, text), with_answers=True).answered
    assert answered is not None
    assert answered.queued_s is answered.scheduled_s is answered.first_token_s is None
    assert answered.finished_s is not None
    assert answered.finished_s.tolist() == [2.5]
    assert read_trace(written(tmp_path, f"{HEAD}\n0,9,5\n"), with_answers=True).answered is None


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("2,9,5,1.5,3,4,5", "line 3: queued_s is 1.5, before arrival_s, 2: give all times in seconds on the clock of"),
        ("2,9,5,3,2.5,4,5", "line 3: scheduled_s is 2.5, before queued_s, 3"),
        ("2,9,5,3,4,3.5,5", "line 3: first_token_s is 3.5, before scheduled_s, 4"),
        ("2,9,5,3,4,5,4.5", "line 3: finished_s is 4.5, before first_token_s, 5"),
    ],
)
def test_answers_out_of_order_are_refused_with_the_line_by_those_alone_who_ask_for_them(
    line: str, named: str, tmp_path: Path
) -> None:
    path = written(tmp_path, f"{ANSWERS}\n0,9,5,0,0,1,3\n{line}\n")
    with pytest.raises(SpecError) as refusal:
        read_trace(path, with_answers=True)
    assert named in str(refusal.value)
    assert len(read_trace(path)) == 2


@pytest.mark.parametrize(("word", "said"), [("nan", "'nan'"), ("inf", "'inf'"), ("", "''"), ("-1", "'-1'")])
def test_answers_that_are_no_times_are_refused_with_the_line(word: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"{ANSWERS}\n0,9,5,0,0,{word},3\n")
    with pytest.raises(SpecError, match=f"line 2: first_token_s is {said}: give a number of seconds"):
        read_trace(path, with_answers=True)


def test_every_problem_is_named_up_to_a_limit(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read_trace(written(tmp_path, HEAD + "\n0,0,1" * 4 + "\n1,1,1\n0,x,1\n"))
    assert len(caught.value.problems) == 5
    with pytest.raises(SpecError) as caught:
        read_trace(written(tmp_path, HEAD + "\n0,0,1" * 400))
    assert len(caught.value.problems) == 10


@pytest.mark.parametrize("content", [b"\x1f\x8bbroken", b"\xff\xfe\x00", gzip.compress(b"x" * 100, mtime=0)[:14]])
def test_unreadable_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(SpecError, match="cannot be read"):
        read_trace(path)
    with pytest.raises(SpecError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_a_trace_is_read_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path = written(tmp_path, f"{HEAD}\n0,100,5\n")
    first = read_trace(path)
    assert read_trace(path) is first
    with pytest.raises(ValueError, match="read-only"):
        first.input_length[0] = 1
    assert read_trace(written(tmp_path, f"{HEAD}\n0,1000,5\n")).input_length.tolist() == [1000]
