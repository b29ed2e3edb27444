"""Promises of `probe analyze` at the command line, and of the comparison of two runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from probe.activations.export import compare_runs, ranked
from probe.commands import main
from probe.commands.analyze import overrides
from probe.report.activations.comparison import change_pictures, comparison_text
from probe.report.figure import Sheet
from tests.report.browser import open_report

TOY = [
    *("--model.path", "tests.activations.toys:make", "--data.num_samples", "3", "--data.seq_len", "12"),
    *("--outlier.threshold", "8", "--dpi", "50", "--heatmap_3d", "false"),
]


def test_keys_of_the_command_line() -> None:
    assert overrides(["--data.seed", "3", "--a.b=c=d", "--magnitude.reduce_dim", "-1"]) == [
        ("data.seed", "3"),
        ("a.b", "c=d"),
        ("magnitude.reduce_dim", "-1"),
    ]
    with pytest.raises(ValueError, match=r"'stray' was not expected\. Give keys as --data\.num_samples 128"):
        overrides(["stray"])
    with pytest.raises(ValueError, match=r"--data\.seed needs a value"):
        overrides(["--data.seed", "--dry-run"])


def test_a_dry_run_shows_everything_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "not made"
    assert main(["analyze", *TOY, "--magnitude.reduce_dim", "-1", "--dry-run", "--save_dir", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("model: tests.activations.toys:make, ")
    last = text.partition("configuration, where it differs from the defaults (--keys shows all):\n")[2]
    assert yaml.safe_load(last.partition("\n\n")[0]) == {
        "model": {"path": "tests.activations.toys:make"},
        "data": {"num_samples": 3, "seq_len": 12},
        "visualization": {
            "save_dir": str(folder),
            "dpi": 50,
            "enabled": {"heatmap_3d": False},
            "magnitude": {"reduce_dim": -1},
            "outlier": {"threshold": 8.0},
        },
    }
    for part in (
        "statistics of the input of 6 modules:\n  layers.0.up_proj\n",
        "outlier tokens of 3 layers:\n  layers.0\n",
        "heat maps of 0 layers, output:\n  none",
        "3 samples, 36 tokens in 1 batch, 0 of padding",
        "magnitude_input.png\n",
        "outlier_token.png (if there are outliers)",
        "Nothing was run",
    ):
        assert part in text, part
    assert not folder.exists()


def test_a_dry_run_of_the_defaults_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--dry-run"]) == 0
    assert "\nconfiguration: the defaults (--keys shows them)\n" in capsys.readouterr().out


def test_a_note_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--save_dir", str(tmp_path), "--output.formats", "json"]
    assert main(["analyze", *TOY, *given]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("brings no tokenizer") == 1
    assert said.out.endswith(f"\nwrote 1 file; open {tmp_path / 'analysis.json'}\n")


def test_keys_are_shown_with_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--keys", "--data.seed=5"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["seed"] == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--data.num_sampels", "3"], "unknown key --data.num_sampels. Did you mean 'data.num_samples'?"),
        (["--data.num_samples", "x"], "--data.num_samples is 'x'; expected a whole number, 1 or more."),
        (["--config", "no.yaml"], "configuration 'no.yaml' does not exist"),
        (["--output", "x"], "--output goes with --compare."),
        (["--data.source", "custom:no.txt"], "data file 'no.txt' does not exist"),
        (["--data.source", "pile"], "data 'pile' is not in the local cache of the hub"),
        (["--model.path", "tiny-mambo"], "unknown model 'tiny-mambo'. Did you mean 'tiny-mamba'?"),
        (["--magnitude.patterns", "nothing"], "visualization.magnitude.patterns: layer 'nothing' matches none of"),
        (["--compare", "a", "b", "--data.seed", "3"], "--compare reads two folders and takes no --data.seed."),
        (["--compare", "a", "b", "--dry-run"], "takes no --dry-run."),
        (["--compare", "a", "b"], "run 'a' does not exist (looked for"),
    ],
)
def test_mistakes_are_one_message(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", *TOY, *given] if "--compare" not in given else ["analyze", *given]) == 2
    said = capsys.readouterr().err
    assert said.startswith("probe: error: ") or "\nprobe: error: " in said
    assert message in said
    assert "Traceback" not in said


def test_layers_without_a_match_shows_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "--model", "tests.activations.toys:make", "dwon_proj"]) == 2
    assert "Nearest: layers.2.down_proj, layers.1.down_proj" in capsys.readouterr().err


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = []
    for name in ("make", "make_other"):
        folder = tmp_path_factory.mktemp(name)
        given = [
            "--model.path",
            f"tests.activations.toys:{name}",
            "--save_dir",
            str(folder),
            "--output.formats",
            "json",
        ]
        assert main(["analyze", *TOY, *given, "--layer_selection.patterns", r"layers\.[01]$|layers\.0\.up"]) == 0
        folders.append(folder)
    return folders[0], folders[1]


def test_what_changed_is_found(runs: tuple[Path, Path]) -> None:
    comparison = compare_runs(*runs)
    rows = {(row["module"], row["kind"]): row for row in comparison.rows}
    layer = rows["layers.0", "output"]
    assert layer["outliers A"] > 0
    assert layer["outliers B"] == 0
    assert layer["amax B/A"] == pytest.approx(layer["amax B"] / layer["amax A"])
    assert layer["max_to_median A"] > 20 * layer["max_to_median B"]
    weight = rows["layers.0.up_proj", "weight"]
    assert (weight["amax B/A"], weight["kurtosis B/A"], weight["outliers A"]) == (1.0, 1.0, None)
    assert comparison.warnings == ()
    assert comparison.figures[:5] == ("amax", "max_to_median", "max_to_p99", "kurtosis", "outliers")


def test_a_comparison_is_a_table_pictures_and_a_page(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", "--compare", *map(str, runs), "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "max/median A" in text
    assert "in A, 0 in B" in text
    names = {path.name for path in tmp_path.iterdir()}
    pictures = {name for name in names if name.endswith(".png")}
    assert names == {"comparison.csv", "comparison_report.html", *pictures}
    assert {"amax.png", "max_to_median.png", "outliers.png", "noise_nvfp4.png"} <= pictures
    with open_report(tmp_path / "comparison_report.html") as browser:
        script = "return [...document.querySelectorAll('img')].every(one => one.naturalWidth > 100)"
        assert browser.execute_script(script)
        assert browser.execute_script("return document.querySelectorAll('img').length") == len(pictures)
        assert "make_other" in browser.find_element("tag name", "body").text


def test_of_a_run_and_itself_nothing_changed(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", "--compare", str(runs[0]), str(runs[0]), "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    same = "Nothing changed: every statistic of the 5 tensors that both runs have is the same."
    assert f"\n\n{same}\n" in text
    assert "max/median A" not in text
    html = (tmp_path / "comparison_report.html").read_text()
    assert f"<p>{same}</p>" in html
    assert "By the change of" not in html


def test_only_what_changed_is_listed_as_changed(runs: tuple[Path, Path], tmp_path: Path) -> None:
    def one(kept: Any) -> None:
        kept["tables"]["statistics"][0]["kurtosis"] = 99.0

    def hidden(kept: Any) -> None:
        kept["tables"]["statistics"][0]["nonfinite"] = 7

    comparison = compare_runs(runs[0], changed(runs[0], tmp_path / "b", one))
    assert not ranked(comparison, "max_to_median")
    assert [row["kurtosis B"] for row in ranked(comparison, "kurtosis")] == [99.0]
    text = comparison_text(comparison)
    assert "\nmax / median is the same in 5 of 5 tensors. What changed otherwise: kurtosis.\n" in text
    text = comparison_text(compare_runs(runs[0], changed(runs[0], tmp_path / "c", hidden)))
    assert "Nothing changed" not in text, "a statistic that is no figure of the table differs"


def test_a_line_never_joins_tensors_of_different_kinds_or_families(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few families in one picture, of many in a picture for each kind."""
    seen: list[list[tuple[str, list[int]]]] = []
    png = Sheet.png

    def kept(page: Sheet) -> bytes:
        shown = [(axes.get_title("left"), [len(one.get_xdata()) for one in axes.lines]) for axes in page.panels]
        seen.append(shown)
        return png(page)

    monkeypatch.setattr(Sheet, "png", kept)
    few = change_pictures(compare_runs(*runs), "amax")
    assert [one.file for one in few] == ["amax"]
    assert seen == [
        [
            ("layers.#.up_proj input", [1, 1]),
            ("layers.# output", [2, 2]),
            ("layers.#.up_proj output", [1, 1]),
            ("layers.#.up_proj weight", [1, 1]),
        ]
    ]

    def many(kept: Any) -> None:
        rows = kept["tables"]["statistics"]
        kept["tables"]["statistics"] = [
            {**rows[0], "module": f"layers.{i}.{name}", "kind": kind}
            for kind in ("output", "input", "weight")
            for i in range(3)
            for name in ("q", "k", "v", "o", "up", "down")
        ]
        kept["tables"]["predicted_error"] = []

    seen.clear()
    folders = [changed(run, tmp_path / name, many) for name, run in zip("ab", runs, strict=True)]
    pictures = change_pictures(compare_runs(*folders), "amax")
    assert [one.file for one in pictures] == ["amax_input", "amax_output", "amax_weight"]
    assert [[title for title, _ in one] for one in seen] == [
        [f"layers.#.{name} {kind}" for name in ("q", "k", "v", "o", "up", "down")]
        for kind in ("input", "output", "weight")
    ]
    assert {tuple(sizes) for one in seen for _, sizes in one} == {(3, 3)}
    assert all("A grey and wide, B orange" in one.caption for one in pictures)


def test_zeros_of_both_runs_are_marked_on_the_lower_edge(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one outlier against none, one would else see a dot and nothing of the other run."""

    def first(kept: Any) -> None:
        for place, row in enumerate(kept["tables"]["outlier_layer_wise"]):
            row["outliers"] = int(place == 0)

    def none(kept: Any) -> None:
        for row in kept["tables"]["outlier_layer_wise"]:
            row["outliers"] = 0

    marks: list[list[float]] = []
    png = Sheet.png

    def kept(page: Sheet) -> bytes:
        marks.extend(list(one.get_xdata()) for one in page.panels[0].lines if one.get_marker() == "v")
        return png(page)

    monkeypatch.setattr(Sheet, "png", kept)
    comparison = compare_runs(changed(runs[0], tmp_path / "a", first), changed(runs[0], tmp_path / "b", none))
    change_pictures(comparison, "outliers")
    assert marks == [[1], [0, 1]]


def changed(run: Path, target: Path, change: Any) -> Path:
    kept = json.loads((run / "analysis.json").read_text())
    change(kept)
    target.mkdir()
    (target / "analysis.json").write_text(json.dumps(kept))
    return target


def test_runs_that_differ_in_more_than_the_model_are_told(runs: tuple[Path, Path], tmp_path: Path) -> None:
    def other(kept: Any) -> None:
        kept["facts"]["data_fingerprint"] = "else"
        kept["settings"]["visualization"]["outlier"]["threshold"] = 9.0
        kept["tables"]["statistics"].pop()

    comparison = compare_runs(runs[0], changed(runs[1], tmp_path / "b", other))
    assert any(one.startswith("the tokens differ: ") for one in comparison.warnings)
    assert "the outlier thresholds differ: 8 and 9" in comparison.warnings
    assert (len(comparison.only[0]), len(comparison.only[1])) == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: kept.update(format=99), r"has the format 99; this probe reads 1\. Run the analysis again"),
        (lambda kept: kept.pop("tables"), r"is not what probe analyze writes \(KeyError: 'tables'\)"),
        (
            lambda kept: kept["tables"].update(statistics=[]),
            r"have no tensor in common\. Compare runs of",
        ),
    ],
)
def test_runs_that_cannot_be_compared(runs: tuple[Path, Path], tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_runs(runs[0], changed(runs[1], tmp_path / "b", change))
    with pytest.raises(ValueError, match=r"has no analysis\.json\. Expected the folder of a run .* json among its"):
        compare_runs(tmp_path, runs[0])


def test_errors_that_were_predicted_are_compared_too(runs: tuple[Path, Path]) -> None:
    comparison = compare_runs(*runs)
    assert "noise fp4_e2m1" in comparison.figures
    assert "spoiled_blocks" in comparison.figures
    row = next(row for row in comparison.rows if (row["module"], row["kind"]) == ("layers.0.up_proj", "input"))
    assert row["noise fp4_e2m1 A"] > 0
    assert row["noise int8 B/A"] == pytest.approx(row["noise int8 B"] / row["noise int8 A"])
    assert row["noise int8 A"] != row["noise int8 B"]
