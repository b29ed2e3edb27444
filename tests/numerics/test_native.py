"""How kernels are loaded, kept on disk and run: folders that cannot be written, no numba, threads, forks, tracers."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import probe
from probe import fake_quantize, fake_quantize_integer, integer_parameters, quantize
from probe.numerics import machine_code, native
from probe.numerics.grids import activation_grid
from probe.numerics.quantize import Options
from tests.numerics.tensors import DTYPES, MX, assert_same_bits, randn
from tests.numerics.test_twins import hostile

ROOT = Path(probe.__file__).parents[1]


def run(program: str, **environment: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# where kernels are kept ---------------------------------------------------------------------------------------


@pytest.fixture
def fresh_folders() -> Iterator[None]:
    machine_code.cache_folder.cache_clear()
    yield
    machine_code.cache_folder.cache_clear()


@pytest.mark.usefixtures("fresh_folders")
def test_the_cache_is_in_the_first_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, closed = tmp_path / "sources", tmp_path / "a file, which no folder can be made in"
    sources.mkdir()
    closed.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    chosen = machine_code.cache_folder(sources, str(tmp_path / "chosen"))
    assert chosen is not None
    assert chosen.parent == tmp_path / "chosen"
    assert machine_code.cache_folder(sources, None) == sources / "__pycache__"
    assert machine_code.cache_folder(sources, str(closed)) == sources / "__pycache__"
    at_home = machine_code.cache_folder(closed, None)
    assert at_home is not None
    assert at_home.parent == tmp_path / "home" / "probe"
    machine_code.cache_folder.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed))
    temporary = machine_code.cache_folder(closed, None)
    assert temporary is not None
    assert temporary.parent.parent == tmp_path / "temporary"
    assert temporary.parent.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("fresh_folders")
def test_a_temporary_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write there could have the process run what he likes."""
    closed = tmp_path / "file"
    closed.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    shared = tmp_path / f"probe-kernels-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    assert machine_code.cache_folder(closed, None) is None


READ_ONLY = """
    import warnings
    warnings.simplefilter("error")
    from pathlib import Path
    from probe.numerics import machine_code
    real = machine_code.cache_folder
    machine_code.cache_folder = lambda sources, chosen: {folder}
    import torch, probe
    x = torch.randn(4, 64)
    expected = probe.fake_quantize(x, "fp8_e4m3", implementation="reference")
    assert torch.equal(probe.fake_quantize(x, "fp8_e4m3"), expected)
    print("ran")
"""


def test_kernels_run_from_an_installation_that_cannot_be_written(tmp_path: Path) -> None:
    """Their machine code goes to the user's folder, and a second process finds it there."""
    program = READ_ONLY.format(folder="real(Path('/proc/nothing'), chosen)")
    home = tmp_path / "home"
    assert run(program, XDG_CACHE_HOME=str(home), NUMBA_CACHE_DIR="") == "ran"
    kept = {path: path.stat().st_mtime_ns for path in home.rglob("*.nbc")}
    assert kept
    assert run(program, XDG_CACHE_HOME=str(home), NUMBA_CACHE_DIR="") == "ran"
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*.nbc")} == kept


def test_a_folder_chosen_for_numba_is_used(tmp_path: Path) -> None:
    program = READ_ONLY.format(folder="real(sources, chosen)")
    assert run(program, NUMBA_CACHE_DIR=str(tmp_path)) == "ran"
    assert list(tmp_path.rglob("mx.write_values*.nbc"))


COMPILER = """
    import sys, torch, probe
    probe.fake_quantize(torch.randn(64, 32), "fp8_e4m3")
    print("numba.typed.typeddict" in sys.modules)
"""


def test_a_kernel_that_is_on_disk_is_run_without_loading_what_compiles(tmp_path: Path) -> None:
    """The registries of all that numba can compile take longer to load than everything else of the first call."""
    assert [run(COMPILER, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)] == ["True", "False"]


SUMS = """
    import torch
    from probe.activations.statistics import measure
    from probe.metrics.comparison import Comparison
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 128, 128, generator=random)
    found = Comparison()
    found.update(x, y)
    print(measure(x, module="m")[0].figures(), found.metrics())
"""


def test_sums_of_a_kernel_just_compiled_are_those_of_the_one_on_disk(tmp_path: Path) -> None:
    """Kernels that may add in any order are compiled alone and into their callers: only one of the two may run."""
    first, second = (run(SUMS, NUMBA_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS="1") for _ in range(2))
    assert first == second


def test_other_sources_have_other_files(tmp_path: Path) -> None:
    """Kernels call functions of other files: all sources of the folder are in the name of what is kept."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mx.py").write_text("same")
        (tmp_path / folder / "bits.py").write_text(folder)
    digests = {machine_code._digest(tmp_path / folder) for folder in ("a", "b")}
    assert len(digests) == 2


WITHOUT_NUMBA = """
    import sys, warnings
    sys.modules["numba"] = None
    import torch, probe
    x = torch.randn(4, 64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("fp8_e4m3", "nvfp4", "int8"):
            expected = probe.fake_quantize(x, name, implementation="reference")
            assert torch.equal(probe.fake_quantize(x, name), expected)
            assert torch.equal(probe.quantize(x, name).dequantize(), expected)
        probe.fake_quantize_integer(x)
    print([str(warning.message) for warning in caught])
"""


def test_without_numba_there_is_one_warning_and_the_same_bits() -> None:
    said = run(WITHOUT_NUMBA)
    assert said.count("numba cannot be loaded") == 1
    assert "Going on without it: the same values, but slower." in said


@pytest.mark.parametrize("program", ["import probe, probe.formats", "import probe.numerics.quantize"])
def test_numba_is_loaded_by_the_first_kernel_only(program: str) -> None:
    assert run(f"import sys; {program}; print('numba' in sys.modules)") == "False"


# on which tensors ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """So many threads, each for however little work."""
    monkeypatch.setattr(native, "THREAD_WORK", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", [*MX, "nvfp4", "int8"])
@pytest.mark.usefixtures("threads")
def test_threads_axes_and_ragged_blocks_change_no_bit(name: str, dtype: torch.dtype) -> None:
    x = hostile(dtype, 8).reshape(-1, 4, 32)[:, :3, :27]
    for axis in range(3):
        options: Options = {"axis": axis, "block_size": 10}
        slow: Options = {**options, "implementation": "reference"}
        expected = fake_quantize(x, name, **slow)
        assert_same_bits(fake_quantize(x, name, **options), expected)
        assert_same_bits(quantize(x, name, **options).dequantize(), expected)
    if name == "int8":
        expected = fake_quantize(x, name, implementation="reference")
        assert_same_bits(fake_quantize(x, name), expected)


@pytest.fixture(params=["openmp", "pool"])
def _mechanism(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of torch's OpenMP, or those of the pool that takes their place where there are none."""
    if request.param == "pool":
        monkeypatch.setattr(native, "_openmp", lambda: None)
    elif native._openmp() is None:
        pytest.skip("torch has no OpenMP here that can be called")


@pytest.mark.usefixtures("_mechanism")
def test_the_work_is_done_on_as_many_threads_as_torch_may_use(threads: int) -> None:
    import threading

    seen = set()
    barrier = threading.Barrier(threads, timeout=30)

    def work(first: int, last: int) -> None:
        barrier.wait()  # all of them at once
        seen.add((threading.get_ident(), first, last))

    native.in_threads(work, 100, 100)
    assert len({ident for ident, _, _ in seen}) == threads
    assert sorted(part for _, *part in seen) == [[100 * i // threads, 100 * (i + 1) // threads] for i in range(threads)]


@pytest.mark.usefixtures("_mechanism")
def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def work(first: int, last: int) -> None:
        if first:
            raise ValueError("in the second part")

    with pytest.raises(ValueError, match="in the second part"):
        native.in_threads(work, 10, 10)


LIMITED = """
    import os
    os.environ["OMP_THREAD_LIMIT"] = "2"
    import torch
    from probe.numerics import native
    native.THREAD_WORK = 1
    torch.set_num_threads(3)
    print(native.in_threads(lambda first, last: last - first, 30, 30))
"""


def test_every_part_is_done_where_openmp_gives_fewer_threads() -> None:
    assert run(LIMITED) == "[10, 10, 10]"


FORKED = """
    import os, torch, probe
    from probe.numerics import machine_code, native
    native.THREAD_WORK = 1
    torch.set_num_threads(2)
    x = torch.randn(64, 64)
    expected = probe.fake_quantize(x, "fp8_e4m3")
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(probe.fake_quantize(x, "fp8_e4m3"), expected) else 1)
    print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    assert run(FORKED) == "0"


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", "int8"])
def test_tensors_that_a_kernel_cannot_read_are_left_to_torch(name: str) -> None:
    """Subclasses, tensors without memory, tracers: the same values, or the shape of them."""
    x = randn(4, 64)
    expected = fake_quantize(x, name)

    class Own(Tensor):
        pass

    assert_same_bits(fake_quantize(x.as_subclass(Own), name).as_subclass(Tensor), expected)
    assert_same_bits(fake_quantize(nn.Parameter(x), name), expected)
    assert_same_bits(fake_quantize(torch._neg_view(-x), name), expected)
    if name == "fp8_e4m3":
        meta = fake_quantize(x.to("meta"), name)
        assert (meta.device.type, meta.shape) == ("meta", x.shape)
        traced = torch.fx.experimental.proxy_tensor.make_fx(lambda y: fake_quantize(y, name))(torch.zeros(4, 64))
        assert_same_bits(traced(x), expected)


class Gridded(nn.Module):
    """A model with grids of every kind between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.grids = [activation_grid("fp8_e4m3", None), activation_grid("int8", 3.0), activation_grid("nvfp4", 3.0)]

    def forward(self, x: Tensor) -> Tensor:
        for grid in self.grids:
            x = self.linear(grid(x))
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own
def test_a_model_with_grids_can_be_compiled() -> None:
    model, x = Gridded().eval(), randn(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))


def test_writing_to_out_is_seen_by_autograd() -> None:
    w, x = torch.randn(4, 32, requires_grad=True), torch.randn(4, 32)
    product = w * x  # keeps x for the gradient of w
    fake_quantize(torch.randn(4, 32), "fp8_e4m3", out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(product.sum(), w)


def test_integers_take_out() -> None:
    x, parameters = randn(20, 70), integer_parameters(torch.tensor(-2.0), torch.tensor(3.0), symmetric=False)
    expected = fake_quantize_integer(x, parameters=parameters, implementation="reference")
    for out in (torch.empty_like(x), torch.empty(70, 20).t(), x.clone()):
        assert fake_quantize_integer(x, parameters=parameters, out=out) is out
        assert_same_bits(out.contiguous(), expected)
    assert fake_quantize_integer(x, parameters=parameters, out=x) is x
    assert_same_bits(x, expected)
    with pytest.raises(ValueError, match=r"out is torch\.float32 of shape \(3,\)"):
        fake_quantize_integer(x, parameters=parameters, out=torch.empty(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own
@pytest.mark.parametrize("strict", [False, True], ids=["fake tensors", "bytecode"])
def test_a_model_with_grids_can_be_exported(strict: bool) -> None:
    model, x = Gridded().eval(), randn(4, 64)
    with torch.no_grad():
        exported = torch.export.export(model, (torch.zeros_like(x),), strict=strict)
        assert torch.equal(exported.module()(x), model(x))


# memory of results --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says how memory is mapped")
@pytest.mark.parametrize("size", [native.HUGE // 4, 4 * native.HUGE + 12345])
def test_a_large_result_asks_for_huge_pages(size: int) -> None:
    made = fake_quantize(torch.zeros(size), "fp8_e4m3")
    middle = made.data_ptr() + made.nbytes // 2
    flags: dict[bool, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= middle < end
        elif first == "VmFlags:":
            flags[inside] = rest
    assert "hg" in flags[True].split()


def test_a_small_result_is_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(native, "libc", lambda: asked.append(1))
    native.new_tensor(torch.Size([native.HUGE // 4 - 1]), torch.float32)
    assert not asked
