"""What tells jobs and units apart: a run must never go on from what another request left behind."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from probe.commands import scaling_batch
from probe.data.calls import Call
from probe.data.samples import TextSamples
from probe.data.tokenizers import ByteTokenizer
from probe.engines import Engine, Job, Unit, interface
from probe.engines.identity import identity_of
from probe.engines.journal import Journal
from probe.engines.local import LocalEngine
from probe.models.loading import Loaded, load_model, weight_fingerprint
from probe.recordings.tensor_sources import tensor_sources
from probe.running import shared_models
from probe.running.measurement_job import measure_all
from probe.running.modes import MODES, find_mode
from probe.running.recipes import Recipe
from probe.running.shared_models import SharedModel
from tests.engines.jobs import Sums


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    inner: Any
    more: Any = None


VALUES: list[Any] = [
    *(None, True, 1, 1.0, -0.0, 0.0, "1", b"1", "", b"", (), [], {}, frozenset()),
    *((1, 2), [1, 2], (1, (2,)), ((1,), 2), ("ab", "c"), ("a", "bc"), ("abc",), Pair(1, 2), {1: 2}, {1, 2}, {(1, 2)}),
    *(Held(1), Held((1,)), Held(None, 1), Held(Held(1)), Fraction(1, 2), Path("a"), torch.float16, torch.bfloat16),
    *(torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, -0.0])),
    *(torch.zeros(2, dtype=torch.int32), torch.tensor(0.0), [torch.zeros(2)], [torch.zeros(1), torch.zeros(1)]),
    *(Call((torch.zeros(1),)), Call((), {"0": torch.zeros(1)}), Recipe("2-1", "int8"), Recipe("2-1", "fp8_e4m3")),
    *(Recipe("linear_w", "int8"), Recipe("linear_w", "int8", include=("head",)), identity_of, Path, len),
]


def test_values_that_differ_anywhere_have_other_digests() -> None:
    every = [identity_of(value) for value in VALUES]
    twice = [(a, b) for i, a in enumerate(VALUES) for j, b in enumerate(VALUES[:i]) if every[i] == every[j]]
    assert not twice


def test_equal_values_have_the_same_digest_in_whatever_order_they_hold_things() -> None:
    assert identity_of({"a": 1, "b": {3, 4}}) == identity_of({"b": {4, 3}, "a": 1})
    assert identity_of(torch.ones(4, 2).T) == identity_of(torch.ones(2, 4))
    same = "".join(["model", " ", "name"])  # an equal string that is another object
    assert identity_of(("model name", "model name")) == identity_of(("model name", same))


@given(st.recursive(st.text() | st.binary() | st.integers(), lambda inner: st.lists(inner).map(tuple)))
def test_a_value_and_the_tuple_of_it_differ(value: Any) -> None:
    assert identity_of(value) == identity_of(value)
    assert identity_of(value) != identity_of((value,)) != identity_of((value, value))


def test_an_object_that_cannot_be_pickled_has_a_digest_all_the_same() -> None:
    inner = lambda x: x  # noqa: E731 - a mode of a user's may be one
    assert identity_of(inner) == identity_of(inner)
    assert identity_of(sys.stdout) == identity_of(sys.stdout)


def test_a_digest_is_the_same_in_every_process() -> None:
    code = (
        "from tests.engines.test_identity import VALUES, identity_of\n"
        "print(' '.join(identity_of(value) for value in VALUES))"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.split() == [identity_of(value) for value in VALUES]


def test_a_job_is_told_apart_by_every_field_and_by_its_type() -> None:
    class Other(Sums):
        pass

    jobs = [
        Sums("a"),
        Sums("b"),
        Sums("a", journaled=True),
        Sums("a", needed=(("x", ""),)),
        Sums("a", room=1),
        Other("a"),
    ]
    assert len({job.key for job in jobs}) == len(jobs)
    assert Sums("a").key == Sums("a").key


def test_a_journal_tells_units_of_one_name_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    journal = Journal("a")
    journal.add(Unit("linear_w-int8", (Recipe("linear_w", "int8"), 0)), b"answer")
    assert Unit("linear_w-int8", (Recipe("linear_w", "int8"), 0)) in Journal("a")
    assert Unit("linear_w-int8", (Recipe("linear_w", "int8", include=("head",)), 0)) not in Journal("a")


# ------------------------------------------------------------------------------------------- the jobs of the commands


class Listening(LocalEngine):
    """Notes the identity of every unit that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.units: set[tuple[str, str]] = set()

    def run(self, job: Job[Any, Any], units: Sequence[Unit], **options: Any) -> Any:
        self.units |= {(job.key, unit.key) for unit in units}
        return super().run(job, units, **options)


ERRORS: dict[str, Any] = {
    "modes": ["linear_wa"],
    "formats": ["int8"],
    "data": TextSamples("evaluation", 4, 16, 2),
    "calibration_data": TextSamples("calibration", 2, 16),
}


def units_of_errors(**options: Any) -> set[tuple[str, str]]:
    engine = Listening()
    measure_all("tiny-llama", engine=engine, **{**ERRORS, **options})
    return engine.units


@pytest.fixture(scope="module")
def usual() -> set[tuple[str, str]]:
    return units_of_errors()


def test_the_same_request_goes_on(usual: set[tuple[str, str]]) -> None:
    assert len(usual) == 3  # the reference, the calibration, the recipe
    assert units_of_errors() == usual


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        ({"include": ["head"]}, 2),  # the reference, and the calibration
        ({"data": TextSamples("evaluation", 4, 16, 4)}, 0),  # other batches of the same samples
        ({"calibration_data": TextSamples("calibration", 3, 16)}, 1),
        ({"percentile": 0.9}, 1),
        ({"injected": True}, 0),
        ({"layers": ["first"]}, 0),
    ],
    ids=["include", "batch size", "calibration", "percentile", "injected", "layers"],
)
def test_another_request_shares_only_what_does_not_depend_on_it(
    option: dict[str, Any], kept: int, usual: set[tuple[str, str]]
) -> None:
    assert len(units_of_errors(**option) & usual) == kept


def test_a_calibration_is_told_apart_by_the_text_of_its_file(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    made = []
    for letters in ("abc", "xyz"):
        text.write_text(letters * 40)
        made.append(units_of_errors(calibration_data=TextSamples(str(text), 2, 16)))
    assert len(made[0] & made[1]) == 1  # the reference


def loaded(epsilon: float) -> Loaded:
    found = load_model("tiny-llama")
    vars(found.model)["config"].rms_norm_eps = epsilon
    return found


def shared(given: Loaded, engine: Engine, **options: Any) -> SharedModel:
    return SharedModel.of("tiny-llama", given, engine, **options)


def test_a_model_is_told_apart_by_its_configuration() -> None:
    plain = load_model("tiny-llama")
    one, other = (shared(loaded(epsilon), LocalEngine()) for epsilon in (1e-6, 1e-3))
    assert one.fingerprint == other.fingerprint == plain.fingerprint
    assert identity_of(shared(plain, LocalEngine())) == identity_of(one) != identity_of(other)


def test_a_worker_that_finds_another_configuration_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_models, "_loaded", None)
    other = shared(loaded(1e-3), LocalEngine())
    with pytest.raises(ValueError, match=r"tiny-llama on .* is another model than here .*rms_norm_eps 0.001 -> 1e-06"):
        other.load()


def test_runs_with_a_function_of_the_users_are_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it makes a quantized model beside a reference that is a plain one."""
    monkeypatch.setattr("probe.running.modes.MODES", dict(MODES))
    given = Loaded("plain", nn.Linear(2, 2), ByteTokenizer(), weight_fingerprint(nn.Linear(2, 2)), ())
    assert shared(given, LocalEngine(), modes=["linear_w"]).is_plain
    mode = find_mode("checkpoint:package:quantized").name
    assert not shared(given, LocalEngine(), modes=[mode]).is_plain
    assert shared(given, LocalEngine(), modes=[mode]).paths == {}


def test_a_job_of_other_versions_is_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Sums("a").key
    monkeypatch.setattr(interface, "installed", lambda: {"probe": "another source"})
    assert Sums("a").key != usual


def scaling_job(file: Path) -> scaling_batch.ScalingJob:
    sources = tensor_sources([str(file)])
    stamps = tuple(scaling_batch._stamp(source.path) for source in sources)
    return scaling_batch.ScalingJob(tuple(sources), scaling_batch.Request(), stamps, is_elsewhere=True)


def test_a_tensor_that_was_written_again_is_another_job_and_a_failure_is_not_final(tmp_path: Path) -> None:
    torch.save(torch.ones(4, 32), file := tmp_path / "x.pt")
    job = scaling_job(file)
    assert scaling_job(file).key == job.key
    os.utime(file, ns=(1, 1))
    assert scaling_job(file).key != job.key
    assert not job.is_final(scaling_batch.Analysed(reason="no such file"))


def test_code_of_the_hub_is_not_journaled_and_memory_is_that_of_three_copies() -> None:
    loaded = load_model("tiny-llama")
    assert not SharedModel.of("tiny-llama", loaded, LocalEngine(), trust_remote_code=True).is_plain
    size = sum(one.nbytes for one in loaded.model.parameters())
    assert SharedModel.of("tiny-llama", loaded, LocalEngine()).memory == 2**29 + 3 * size
