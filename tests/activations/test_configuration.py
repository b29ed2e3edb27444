"""Promises of the configuration: every key is known, checked, overridable and used."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from probe.activations.run import analyze
from probe.activations.settings import ALL_KEYS, Settings, full_key, read_configuration
from probe.report.activations.files import write_analysis
from probe.settings import ConfigurationError, keys_of, with_values

CONFIGS = Path(__file__).parents[2] / "configs"
TOY = {
    "model.path": "tests.activations.toys:make",
    "data.num_samples": "3",
    "data.seq_len": "12",
    "data.batch_size": "2",
    "outlier.threshold": "8",
}


def quiet(_: str) -> None:
    return


def test_the_default_file_is_the_defaults() -> None:
    assert read_configuration(CONFIGS / "default.yaml") == Settings()
    assert dict(keys_of(read_configuration(CONFIGS / "default.yaml"))).keys() == dict(keys_of(Settings())).keys()
    written = yaml.safe_load((CONFIGS / "default.yaml").read_text())
    assert written == Settings().as_dict(), "every key is in the file"


def test_the_example_file_is_valid() -> None:
    settings = read_configuration(CONFIGS / "example.yaml")
    assert settings.visualization.magnitude.reduce_dim == -1
    assert settings.data.source == "pile"
    assert settings.visualization.enabled.outlier_token, "what is left out is as it was"


def test_the_configuration_of_the_users_document(tmp_path: Path) -> None:
    """Word for word as in seed 002."""
    (tmp_path / "my_model.yaml").write_text(SEED, encoding="utf-8")
    settings = read_configuration(
        tmp_path / "my_model.yaml", [("data.num_samples", "128"), ("outlier.threshold", "100")]
    )
    assert settings.data.num_samples == 128
    assert settings.visualization.outlier.threshold == 100.0
    assert settings.visualization.magnitude.patterns[0] == r"mlp\.down_proj"
    assert settings.visualization.layer_selection.patterns[1] == r"layers\.\d+\.self_attn\.q_proj"
    assert settings.memory.device == "cuda"
    assert settings.visualization.save_dir == "./figures"


def test_the_configuration_of_the_users_document_runs(tmp_path: Path) -> None:
    """With a model, a text and a device that are here; its layer_selection and all its patterns as they are."""
    (tmp_path / "my_model.yaml").write_text(SEED, encoding="utf-8")
    here = {"model.path": "tiny-llama", "data.source": "builtin", "memory.device": "cpu", "data.seq_len": "16"}
    settings = read_configuration(tmp_path / "my_model.yaml", [*here.items(), ("data.num_samples", "2")])
    analysis = analyze(settings, progress=quiet)
    selected = {f"model.layers.{i}.{part}" for i in range(4) for part in ("mlp.down_proj", "self_attn.q_proj")}
    assert {name for name, kind in analysis.statistics if kind == "input"} == selected
    assert set(analysis.bands) == selected, "a plot that it never mentions"
    assert set(analysis.outliers) == {f"model.layers.{i}" for i in range(4)}, "its own pattern"
    assert not analysis.heat


def test_overrides_win_and_are_read_as_yaml() -> None:
    given = [
        ("data.seed", "7"),
        ("visualization.magnitude.reduce_dim", "-2"),
        ("model.name", "null"),
        ("magnitude.patterns", r"[mlp\.up, down]"),
        ("distribution.patterns", r"layers\.\d+: x"),
        ("output.formats", "csv"),
        ("heatmap_3d.view_angle", "[10, -20]"),
        ("enabled.heatmap_3d", "false"),
        ("memory.max_memory", "1.5 GiB"),
        ("data.num-samples", "9"),
        ("outlier.pattern", r"[ab]\."),
        ("outlier.threshold", "1e3"),
    ]
    settings = read_configuration(CONFIGS / "default.yaml", given)
    seen = settings.visualization
    assert (settings.data.seed, settings.data.num_samples, settings.model.name) == (7, 9, None)
    assert seen.magnitude.patterns == (r"mlp\.up", "down")
    assert seen.distribution.patterns == (r"layers\.\d+: x",), "not a table"
    assert seen.outlier.pattern == r"[ab]\.", "not a list, and no YAML"
    assert (seen.magnitude.reduce_dim, seen.outlier.threshold) == (-2, 1000.0)
    assert settings.output.formats == ("csv",)
    assert seen.heatmap_3d.view_angle == (10.0, -20.0)
    assert not seen.enabled.heatmap_3d
    assert settings.memory.max_memory == 1610612736


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("data.num_samples", "data.num_samples"),
        ("outlier.threshold", "visualization.outlier.threshold"),
        ("threshold", "visualization.outlier.threshold"),
        ("heatmap_3d", "visualization.enabled.heatmap_3d"),
        ("custom.text_column", "data.custom.text_column"),
    ],
)
def test_short_spellings(given: str, expected: str) -> None:
    assert full_key(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("data.num_sample", "unknown key --data.num_sample. Did you mean 'data.num_samples'? All keys: probe analyze"),
        ("foo.bar", "unknown key --foo.bar. Sections: model, data, visualization, memory, output. All keys: probe"),
        ("outlier.treshold", "Did you mean 'visualization.outlier.threshold'?"),
        ("is_input", "--is_input can be any of visualization.distribution.is_input, visualization.heatmap_3d.is_input"),
        ("data", "--data is a section. Give one of its keys: data.source, data.num_samples"),
        ("data.custom", "--data.custom is a section. Give one of its keys: data.custom.format"),
    ],
)
def test_unknown_keys_of_the_command_line(given: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        full_key(given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dta": {}}, "unknown key 'dta'. Did you mean 'data'?"),
        ({"data": {"num_sampels": 3}}, "unknown key 'data.num_sampels'. Did you mean 'data.num_samples'?"),
        ({"data": {"custom": {"column": 3}}}, "'data.custom.column'. Did you mean 'data.custom.text_column'?"),
        ({"threshold": 3}, "unknown key 'threshold'. Did you mean 'visualization.outlier.threshold'?"),
        ({"data": 3}, "data is 3; expected a table of source, num_samples"),
        ([1], "x.yaml is [1]; expected a table of model, data, visualization, memory, output."),
        ({"data": {"num_samples": "many"}}, "data.num_samples is 'many'; expected a whole number, 1 or more."),
        ({"data": {"num_samples": 0}}, "data.num_samples is 0; expected a whole number, 1 or more."),
        ({"data": {"num_samples": True}}, "data.num_samples is True; expected a whole number, 1 or more."),
        ({"data": {"seed": -1}}, "data.seed is -1; expected a whole number, 0 or more."),
        ({"data": {"source": ""}}, "data.source is ''; expected a text that is not empty."),
        ({"data": {"custom": {"format": "xml"}}}, "expected one of null, txt, json, jsonl, csv, parquet."),
        ({"model": {"dtype": "int8"}}, "expected one of float32, bfloat16, float16, auto."),
        ({"model": {"sites": "yes"}}, "model.sites is 'yes'; expected true or false."),
        ({"visualization": {"dpi": 5}}, "visualization.dpi is 5; expected a whole number, 20 or more."),
        ({"visualization": {"enabled": {"outlier_token": 1}}}, "outlier_token is 1; expected true or false."),
        ({"visualization": {"magnitude": {"reduce_dim": 1}}}, "expected one of null, -1, -2."),
        ({"visualization": {"magnitude": {"patterns": []}}}, "expected a list of regular expressions"),
        ({"visualization": {"magnitude": {"patterns": ["("]}}}, "expected a regular expression (missing ), "),
        ({"visualization": {"outlier": {"pattern": 3}}}, "is 3; expected a regular expression over module names."),
        ({"visualization": {"outlier": {"threshold": 0}}}, "threshold is 0; expected a number above 0."),
        ({"visualization": {"distribution": {"plot_types": ["pie"]}}}, "a list of some of boxplot, histogram."),
        ({"visualization": {"heatmap_3d": {"view_angle": [1]}}}, "expected two numbers, elevation and azimuth"),
        ({"visualization": {"heatmap_3d": {"sample_idx": -1}}}, "expected a whole number, 0 or more."),
        ({"memory": {"offload_device": "tape"}}, "expected one of cpu, disk."),
        ({"memory": {"max_memory": "lots"}}, "expected a size such as 2GB, 500MB or a number of bytes"),
        ({"memory": {"max_memory": 0}}, "expected a size such as 2GB"),
        ({"output": {"formats": []}}, "expected a list of some of png, html, csv, json."),
    ],
)
def test_wrong_values_are_told_with_what_was_expected(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        with_values(Settings(), given, where="x.yaml", see=ALL_KEYS)
    assert str(caught.value).startswith(("x.yaml: ", "x.yaml is "))
    assert message in str(caught.value)


def test_a_key_that_is_there_twice_is_named_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("data:\n  seed: 1\n  num_samples: 2\n  seed: 3\n")
    with pytest.raises(ConfigurationError, match=r"twice.yaml: key 'seed' is there twice, in lines 2 and 4. Keep one."):
        read_configuration(file)
    file.write_text("data: {seed: 1}\nmodel: {}\ndata: {seed: 1}\n")
    with pytest.raises(ConfigurationError, match=r"key 'data' is there twice, in lines 1 and 3"):
        read_configuration(file)
    file.write_text("visualization:\n  distribution: &own {is_input: true}\n  percentile_range:\n    <<: *own\n")
    assert read_configuration(file).visualization.percentile_range.is_input, "the same key in two tables is fine"


def test_a_pattern_is_shown_as_it_was_typed() -> None:
    with pytest.raises(ConfigurationError, match=r"is '\(layers\\.\\d'; expected"):
        read_configuration(None, [("outlier.pattern", r"(layers\.\d")])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no.yaml' does not exist \(looked for .*\)\. Expected a YAML file"):
        read_configuration(tmp_path / "no.yaml")
    with pytest.raises(ConfigurationError, match=r"is a folder\. Expected a YAML file"):
        read_configuration(tmp_path)
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigurationError, match=r"bad.yaml: is not YAML that can be read .* Correct it and run"):
        read_configuration(tmp_path / "bad.yaml")
    (tmp_path / "python.yaml").write_text("model: !!python/object/apply:os.getcwd []")
    with pytest.raises(ConfigurationError, match=r"is not YAML that can be read \(could not determine a constructor"):
        read_configuration(tmp_path / "python.yaml")
    (tmp_path / "empty.yaml").write_text("data:\n")
    assert read_configuration(tmp_path / "empty.yaml") == Settings(), "an empty section is the defaults"


#: For every key another value than in TOY, and what else must be given for it to matter.
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "model.path": ("tests.activations.toys:make_other", {}),
    "model.name": ("another name", {}),
    "model.dtype": ("bfloat16", {}),
    "model.sites": (True, {"model.path": "tiny-mamba", "magnitude.patterns": "mixer.*(out_proj|scan.u)$"}),
    "data.source": ("custom:DATA/own.txt", {}),
    "data.num_samples": (4, {}),
    "data.seq_len": (13, {}),
    "data.batch_size": (3, {}),
    "data.seed": (1, {}),
    "data.split": ("test", {"data.source": "hf:DATA/hub"}),
    "data.inputs": ("tests.activations.toys:batches", {"data.source": "builtin"}),
    "data.custom.format": ("txt", {"data.source": "custom:DATA/own.jsonl"}),
    "data.custom.text_column": ("title", {"data.source": "custom:DATA/own.jsonl"}),
    "visualization.save_dir": ("elsewhere", {}),
    "visualization.dpi": (40, {}),
    "visualization.enabled.magnitude_input": (False, {}),
    "visualization.enabled.magnitude_output": (False, {}),
    "visualization.enabled.magnitude_weight": (False, {}),
    "visualization.enabled.outlier_layer_wise": (False, {}),
    "visualization.enabled.outlier_position": (False, {}),
    "visualization.enabled.outlier_token": (False, {}),
    "visualization.enabled.heatmap_3d": (False, {}),
    "visualization.enabled.distribution": (False, {}),
    "visualization.enabled.percentile_range": (False, {}),
    "visualization.magnitude.patterns": ("up_proj", {}),
    "visualization.magnitude.reduce_dim": (-1, {}),
    "visualization.outlier.threshold": (10**6, {}),
    "visualization.outlier.pattern": ("up_proj", {}),
    "visualization.outlier.decode_tokens": (False, {}),
    "visualization.distribution.patterns": ("up_proj", {}),
    "visualization.distribution.plot_types": ("[boxplot]", {}),
    "visualization.distribution.is_input": (False, {}),
    "visualization.heatmap_3d.pattern": ("up_proj", {}),
    "visualization.heatmap_3d.sample_idx": (1, {}),
    "visualization.heatmap_3d.is_input": (True, {}),
    "visualization.heatmap_3d.view_angle": ("[10, 10]", {}),
    "visualization.percentile_range.patterns": ("up_proj", {}),
    "visualization.percentile_range.is_input": (True, {}),
    "visualization.layer_selection.patterns": ("layers.1", {}),
    "memory.device": ("meta", {}),
    "memory.offload_device": ("disk", {"memory.max_memory": "10kB"}),
    "memory.auto_offload": (False, {"memory.max_memory": "10kB", "memory.offload_device": "disk"}),
    "memory.max_memory": ("10kB", {"memory.offload_device": "disk"}),
    "output.formats": ("[csv]", {}),
}
DRAWN = ("visualization.dpi", "visualization.heatmap_3d.view_angle", "output.formats")


def outcome(given: dict[str, Any], data: Path) -> dict[str, str]:
    """Every file of a run by its digest, the settings left out, and what it said; or the message of an error."""
    said: list[str] = []
    overrides = [(name, str(value).replace("DATA", str(data))) for name, value in given.items()]
    try:
        analysis = analyze(read_configuration(None, overrides), progress=said.append)
        files = write_analysis(analysis, progress=said.append)
    except ValueError as problem:
        return {"error": str(problem)}
    found = {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.suffix in (".csv", ".png")}
    rest = {str(f): "there" for f in files}
    return rest | found | {"facts": str(analysis.facts), "notes": str(analysis.notes), "said": str(said)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "own.txt").write_text("Something else entirely. " * 20)
    rows = [f'{{"text": "document {i} of the tests", "title": "heading of number {i}"}}' for i in range(9)]
    (folder / "own.jsonl").write_text("\n".join(rows))
    (folder / "hub").mkdir()
    for split in ("train", "test"):
        rows = [f'{{"text": "the {split} text {i}"}}' for i in range(6)]
        (folder / "hub" / f"{split}.jsonl").write_text("\n".join(rows))
    return folder


def test_every_key_has_another_value_to_be_tried() -> None:
    assert OTHER.keys() == dict(keys_of(Settings())).keys()


@pytest.mark.parametrize("key", OTHER)
def test_no_key_is_ignored(key: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value, more = OTHER[key]
    drawn = {f"enabled.{name}": "false" for name in vars(Settings().visualization.enabled) if name != "heatmap_3d"}
    formats = {"output.formats": "[csv, png]", **drawn} if key in DRAWN else {"output.formats": "[csv]"}
    base = {**TOY, **formats, **more}
    monkeypatch.chdir(tmp_path)
    before, after = outcome(base, data), outcome({**base, key: value}, data)
    assert key == "memory.offload_device" or "error" not in before
    assert before != after


SEED = r"""
model:
  path: "/path/to/your/model"
  name: "my-model"
data:
  source: "pile"  # 或 custom:/path/to/file.txt
  num_samples: 64
  seq_len: 1024
  seed: 0
visualization:
  save_dir: "./figures"
  dpi: 200
  enabled:
    magnitude_input: true
    magnitude_output: true
    magnitude_weight: false
    outlier_layer_wise: true
    outlier_position: true
    outlier_token: true
    heatmap_3d: false
    distribution: false
  magnitude:
    patterns:
      - "mlp\\.down_proj"      # 匹配所有 down_proj 层
      - "mlp\\.up_proj"        # 匹配所有 up_proj 层
      - "self_attn\\.q_proj"   # 匹配所有 q_proj 层
      - "self_attn\\.o_proj"   # 匹配所有 o_proj 层
    reduce_dim: null
  outlier:
    threshold: 64
    pattern: "layers\\.\\d+$"  # 匹配 transformer 层输出
    decode_tokens: true
  layer_selection:
    patterns:
      - "layers\\.\\d+\\.mlp\\.down_proj"
      - "layers\\.\\d+\\.self_attn\\.q_proj"
memory:
  device: "cuda"
  offload_device: "cpu"
  auto_offload: true
"""


def test_an_override_of_none_is_no_text() -> None:
    for text in ("None", "null", "~"):
        assert read_configuration(None, [("model.name", text)]).model.name is None
    with pytest.raises(ConfigurationError, match=r"--model\.path is None; expected a text that is not empty"):
        read_configuration(None, [("model.path", "None")])
