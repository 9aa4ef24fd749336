import json

import pytest
from benchmarks.__main__ import main
from benchmarks.commands import command
from benchmarks.parts import Parts

from benchmarks import page

ABOUT = {"line": "python -m benchmarks counts", "threads": 2}


class Measured:
    """A plan of two parts, the second of which may be interrupted."""

    def __init__(self, interrupted=False):
        self.calls = []
        self.interrupted = interrupted

    def plan(self, arguments=None):
        return {"rows": {"first": lambda: self.part(1), "second": lambda: self.part(2)}, "fixed": [3, None]}

    def part(self, number):
        self.calls.append(number)
        if number == 2 and self.interrupted:
            raise KeyboardInterrupt
        return {"flops": number, "calls": number, "saved": number}


def test_a_plan_becomes_the_result_of_its_calls(tmp_path):
    measured = Measured()
    parts = Parts(tmp_path / "x.json", ABOUT)
    data = parts.carry_out(measured.plan())
    assert measured.calls == [1, 2]
    assert parts.seconds > 0
    assert data == {"rows": {"first": measured.part(1), "second": measured.part(2)}, "fixed": [3, None]}


def interrupted(tmp_path, monkeypatch, capsys):
    """Run a command until its second part, and return where its finished one is."""
    monkeypatch.setattr(command("counts"), "plan", Measured(interrupted=True).plan)
    with pytest.raises(SystemExit) as stopped:
        main(["counts", "--out", str(tmp_path / "x.json")])
    assert "x.json.parts: go on with --resume" in str(stopped.value.code)
    assert not (tmp_path / "x.json").exists()
    return tmp_path / "x.json.parts"


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    interrupted(tmp_path, monkeypatch, capsys)
    measured = Measured()
    monkeypatch.setattr(command("counts"), "plan", lambda arguments: measured.plan())
    monkeypatch.setattr(command("counts"), "describe", lambda data: [str(data["fixed"])])
    main(["counts", "--out", str(tmp_path / "x.json"), "--resume"])
    assert measured.calls == [2]
    written = json.loads((tmp_path / "x.json").read_text())
    assert [row["flops"] for row in written["data"]["rows"].values()] == [1, 2]
    assert written["line"] == "python -m benchmarks counts"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    main(["counts", "--out", str(tmp_path / "x.json"), "--again", "first"])
    assert measured.calls == [2, 1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ([], "holds parts of an interrupted run: go on with --resume, or delete it"),
        (["--resume", "--quick"], "another line, 'python -m benchmarks counts' instead of"),
        (["--resume", "--threads", "1"], "another line"),
    ],
)
def test_parts_are_not_lost_nor_mixed_with_others(tmp_path, monkeypatch, capsys, change, reason):
    parts = interrupted(tmp_path, monkeypatch, capsys)
    before = parts.read_text()
    monkeypatch.setattr(command("counts"), "plan", lambda arguments: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        main(["counts", "--out", str(tmp_path / "x.json"), *change])
    assert reason in capsys.readouterr().err
    assert parts.read_text() == before


def test_another_machine_does_not_go_on(tmp_path):
    first = Parts(tmp_path / "x.json", {**ABOUT, "machine": {"cores": 2}})
    first.carry_out([lambda: 1])
    with pytest.raises(ValueError, match=r"another machine, \{'cores': 2\} instead of \{'cores': 64\}"):
        Parts(tmp_path / "x.json", {**ABOUT, "machine": {"cores": 64}}).read(resume=True)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"about": 1, "finished": 2}', '{"about": {}, "finished": {}}']
)
def test_damaged_parts_are_named(tmp_path, content):
    (tmp_path / "x.json.parts").write_text(content)
    with pytest.raises(ValueError, match=r"x\.json\.parts does not hold parts of a run .*: delete it"):
        Parts(tmp_path / "x.json", ABOUT).read(resume=True)


def test_nothing_to_go_on_with_is_a_start(tmp_path):
    parts = Parts(tmp_path / "x.json", ABOUT)
    parts.read(resume=True)
    assert parts.finished == {}


def test_a_call_alone_is_a_plan(tmp_path):
    assert Parts(tmp_path / "x.json", ABOUT).carry_out(lambda: {"a": (1, 2)}) == {"a": (1, 2)}


def test_parts_of_different_results_are_in_different_files(tmp_path):
    paths = {Parts(tmp_path / name, ABOUT).path for name in ("run.1", "run.2", "run.parts")}
    assert len(paths) == 3
    assert not paths & {tmp_path / "run.parts"}


@pytest.fixture
def renewable(tmp_path, monkeypatch):
    """A command with two parts, measured once; returns what counts its calls."""
    measured = Measured()
    monkeypatch.setattr(command("counts"), "plan", lambda arguments: measured.plan())
    monkeypatch.setattr(command("counts"), "describe", lambda data: [])
    main(["counts", "--out", str(tmp_path / "x.json")])
    measured.calls.clear()
    return measured


def test_one_part_is_measured_again(tmp_path, renewable):
    before = json.loads((tmp_path / "x.json").read_text())
    main(["counts", "--out", str(tmp_path / "x.json"), "--again", "second"])
    after = json.loads((tmp_path / "x.json").read_text())
    assert renewable.calls == [2]
    assert [entry["parts"] for entry in after["again"]] == [["second"]]
    assert {key: after[key] for key in before if key != "again"} == {k: v for k, v in before.items() if k != "again"}
    assert "Measured again on" in page._again(after["again"][0])
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    main(["counts", "--out", str(tmp_path / "x.json"), "--again", "rows"])
    assert renewable.calls == [2, 1, 2]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["--again", "third"], "--again third: the parts are rows / first, rows / second"),
        (["--again", "second", "--quick"], "another line"),
        (["--again", "second", "--out", "none.json"], "there is no result in none.json"),
    ],
)
def test_only_parts_of_the_same_run_are_measured_again(tmp_path, renewable, monkeypatch, capsys, line, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["counts", "--out", "x.json", *line])
    assert reason in capsys.readouterr().err
    assert not renewable.calls


def test_a_result_of_another_plan_is_not_renewed(tmp_path, renewable, capsys):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "data": {"rows": {}}}))
    with pytest.raises(SystemExit):
        main(["counts", "--out", str(path), "--again", "second"])
    assert "not of this plan ('first'): measure all of it" in capsys.readouterr().err


def test_an_interrupted_renewal_goes_on_where_it_was(tmp_path, renewable):
    line = ["counts", "--out", str(tmp_path / "x.json"), "--again", "rows"]
    renewable.interrupted = True
    with pytest.raises(SystemExit):
        main(line)
    renewable.interrupted = False
    main([*line, "--resume"])
    assert renewable.calls == [1, 2, 2]
    assert [entry["parts"] for entry in json.loads((tmp_path / "x.json").read_text())["again"]] == [["rows"]]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_nothing_is_left_to_resume_if_only_the_terminal_is_gone(tmp_path, renewable, monkeypatch):
    def closed(data):
        raise BrokenPipeError

    monkeypatch.setattr(command("counts"), "describe", closed)
    with pytest.raises(BrokenPipeError):
        main(["counts", "--out", str(tmp_path / "x.json")])
    assert renewable.calls == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_full_disk_is_said_in_a_line(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, f"cannot write {path}: No space left on device")

    monkeypatch.setattr(command("counts"), "plan", Measured().plan)
    monkeypatch.setattr("benchmarks.results.write_whole", full)
    with pytest.raises(SystemExit) as stopped:
        main(["counts", "--out", str(tmp_path / "x.json")])
    assert "x.json.parts: No space left on device" in str(stopped.value.code)
    assert "--resume" not in str(stopped.value.code)
