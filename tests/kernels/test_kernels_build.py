"""Tests of the kernel build: compiler commands, caching, and an error message for each failure."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from megatronish.ops import build, library
from megatronish.ops.build import BuildError, Kernel

NAME = "_Z3addPf"
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3addPf' for 'sm_80'
ptxas info    : Function properties for _Z3addPf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 256 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 12.345 ms
ptxas info    : Compiling entry function '_Z3addPf' for 'sm_100'
ptxas info    : Function properties for _Z3addPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 0 barriers
"""


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)


@pytest.mark.usefixtures("no_nvcc")
def test_setup_says_that_there_is_no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["setup.py", "--quiet", "build_ext", "--build-lib", str(tmp_path)])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="error: CUDA's compiler nvcc is not here, so the kernels cannot be built"):
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")


def test_setup_builds_into_the_folder_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(build, "build_cuda", asked.append)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--quiet", "build_ext", "--build-lib", str(tmp_path)])
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
    assert asked == [tmp_path / "megatronish" / "ops" / "kernels_cuda.so"]


def test_an_installation_has_kernels_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["setup.py", "--quiet", "--name"])
    monkeypatch.chdir(ROOT)
    for value, wanted in ((None, False), ("", False), ("0", False), ("1", True)):
        if value is not None:
            monkeypatch.setenv("MEGATRONISH_BUILD_KERNELS", value)
        assert runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")["kernels_wanted"] is wanted


def test_make_kernels_says_that_there_is_no_nvcc() -> None:
    nothing_found = "import shutil, sys; shutil.which = lambda *_, **__: None"
    code = f"{nothing_found}; from megatronish.ops import build; sys.exit(build.main())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("CUDA's compiler nvcc is not here") and "Traceback" not in done.stderr


def test_nvcc_is_that_of_cuda_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"{path or 'PATH'}/{name}")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert build.find_nvcc() == "PATH/nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.find_nvcc() == f"{tmp_path}/bin/nvcc"


def test_there_is_code_for_each_gpu_that_nvcc_knows_and_ptx_of_the_oldest_and_the_newest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: dict[Path, list[str]] = {}
    monkeypatch.setattr(build, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    monkeypatch.setattr(build, "_run", lambda _: "sm_75 sm_80 sm_90")
    monkeypatch.setattr(build, "_compile", lambda given: commands.update(given) or [])
    monkeypatch.setattr(build, "_link", lambda *_, **__: None)
    assert build.build_cuda(tmp_path / "kernels_cuda.so") == []
    assert commands.keys() == {*build.kernel_sources(), build.SOURCES / "bindings.cpp"}
    for source in build.kernel_sources():
        targets = [word.partition("=arch=")[2] for word in commands[source] if word.startswith("-gencode")]
        ptx = ["compute_75,code=compute_75", "compute_90,code=compute_90"]
        assert targets == ["compute_80,code=sm_80", "compute_90,code=sm_90", *ptx]


def test_an_nvcc_that_knows_no_such_gpu_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "_run", lambda _: "sm_60 sm_70")
    with pytest.raises(BuildError, match="nvcc knows none of sm_80, sm_90, sm_100: a newer CUDA toolkit does"):
        build.build_cuda(tmp_path / "kernels_cuda.so")


def test_an_object_is_kept_until_something_changes_that_it_is_made_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compile_nothing(command: list[str]) -> str:
        if "-o" in command:
            Path(command[-1]).touch()
        return ""

    source, header, torch_version = tmp_path / "a.cu", tmp_path / "a.h", tmp_path / "version.py"
    for path in (source, header, torch_version):
        path.touch()
    for name, value in (("SOURCES", tmp_path), ("_run", compile_nothing), ("_version", lambda _: "")):
        monkeypatch.setattr(build, name, value)
    for name in ("find_torch", "_cache"):
        monkeypatch.setattr(build, name, lambda: tmp_path)
    kept = build._compile({source: ["g++"]})
    assert build._compile({source: ["g++"]}) == kept
    for path in (source, header, torch_version):
        path.write_text("other")
        before, kept = kept, build._compile({source: ["g++"]})
        assert kept != before
    assert build._compile({source: ["g++", "-O3"]}) != kept
    monkeypatch.setattr(build, "_version", lambda _: "other")
    assert build._compile({source: ["g++"]}) != kept


def test_the_library_ends_with_a_hash_of_its_sources_and_of_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources, output = tmp_path / "kernels", tmp_path / "kernels_cuda.so"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    before = build.sources_hash()
    (sources / ".#norm.cu").symlink_to("an editor's lock")
    (sources / "norm.cu~").write_text("its copy")
    assert build.sources_hash() == before and sources / ".#norm.cu" not in build.kernel_sources()
    monkeypatch.setattr(build, "_run", lambda command: Path(command[command.index("-o") + 1]).write_text("linked"))
    build._link(["linker"], [], [], output, ending=before)
    assert output.read_text() == "linked" + before and library._is_of_these_sources(output)
    for path in (sources / "norm.cu", sources / "norm.h", sources / "bindings.cpp"):
        path.write_text("other")
        assert not library._is_of_these_sources(output)
        build._link(["linker"], [], [], output, ending=build.sources_hash())
        assert library._is_of_these_sources(output)


def test_torch_is_found_where_it_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    headers = tmp_path / "torch" / "include" / "torch" / "csrc" / "stable"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(BuildError, match=r"built against torch's headers: install torch 2\.11 or newer first"):
        build.find_torch()
    headers.mkdir(parents=True)
    assert build.find_torch() == tmp_path / "torch"


@pytest.mark.processes
def test_registers_and_spills_are_read_from_the_compiler() -> None:
    found = build._kernels(LOG, {(NAME, "sm_80"): (16, 2)})
    name = found[0].name
    assert found == [Kernel(name, "sm_80", 40, 256, 16, 16, 2), Kernel(name, "sm_100", 38, 0, 0)]
    assert build.table(found).splitlines() == [
        "registers on sm_80, sm_100; bytes of static shared memory, spilled, of a load, of a store",
        f"  40  38    256     16   0   0  {name}",
    ]


@pytest.mark.parametrize(("spilled", "status"), [(0, 0), (16, 1)])
def test_a_spill_is_a_failure(spilled: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_cuda", lambda _: [Kernel("add", "sm_80", 40, 0, spilled)])
    monkeypatch.setattr(build, "_run", lambda _: "")
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.main() == status


def test_nothing_read_from_the_compiler_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_cuda", lambda _: [])
    monkeypatch.setattr(build, "_run", lambda _: "")
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.main() == 1


@pytest.mark.parametrize(
    ("name", "load", "store", "is_narrow"),
    [
        ("add_rows<BFloat16, true>", 16, 4, True),
        ("forward_once<Half, WarpTeam<32>, 2, true>", 2, 16, True),
        ("add_rows<Half, false>", 16, 16, False),
        ("add_rows<float, false>", 16, 4, False),
        ("forward<Swiglu, Half, 8>", 16, 2, True),
        ("forward<Swiglu, Half, 1>", 2, 2, False),  # for rows that begin anywhere
        ("sum_parts<Half>", 4, 4, False),
        ("statistics_of_row<Half, RowBlock>", 16, 4, False),  # three numbers a row
        ("statistics_of_row<Half, RowBlock>", 2, 4, True),
    ],
)
def test_a_kernel_that_moves_single_elements_is_a_failure(
    name: str,
    load: int,
    store: int,
    is_narrow: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, "build_cuda", lambda _: [Kernel(name, "sm_90", 40, 0, 0, load, store)])
    monkeypatch.setattr(build, "_run", lambda _: "")
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.main() == int(is_narrow)
    said = f"these move no 16 bytes at once: {name} on sm_90"
    assert (said in capsys.readouterr().out) is is_narrow


@pytest.mark.processes
def test_every_kernel_for_16_bit_elements_moves_16_bytes_at_once(request: pytest.FixtureRequest) -> None:
    """By its machine code, for sm_80 and sm_90, without a GPU; nor does one spill registers.

    `make kernels` asks this of all families, here `--all-layouts` does. Of dropout, compiled in seconds, it was not so
    on either architecture: the compiler took the store of a vector apart, seven stores in place of one.
    """
    try:
        build.find_nvcc()
    except BuildError as error:
        pytest.skip(f"kernels are compiled for a GPU: {error}")
    dropout = [build.SOURCES / "dropout.cu"]
    sources = build.kernel_sources() if request.config.getoption("--all-layouts") else dropout
    kernels = build.compile_cuda(sources, architectures=(80, 90))
    assert {each.architecture for each in kernels} == {"sm_80", "sm_90"}
    assert not [each for each in kernels if each.is_narrow or each.spill_bytes]
    halves = [each for each in kernels if each.name.startswith("add_rows<") and "float" not in each.name]
    assert len(halves) == 8 and {(each.load_bytes, each.store_bytes) for each in halves} == {(16, 16)}
