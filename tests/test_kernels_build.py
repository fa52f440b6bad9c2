"""Is what cannot be built or loaded told in a sentence, and does everything run without it?"""

import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatronish.ops import build, library, report
from megatronish.ops.build import BuildError, Kernel

ROOT = Path(__file__).parent.parent
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


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What has been found about the library of kernels is forgotten, before and after."""
    monkeypatch.delenv("MEGATRONISH_KERNELS", raising=False)
    library.load_kernels.cache_clear()
    yield
    library.load_kernels.cache_clear()


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
    for value, wanted in ((None, False), ("0", False), ("1", True)):
        if value is not None:
            monkeypatch.setenv("MEGATRONISH_BUILD_KERNELS", value)
        assert runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")["kernels_wanted"] is wanted


def test_make_kernels_says_that_there_is_no_nvcc() -> None:
    nothing_found = "import shutil, sys; shutil.which = lambda *_, **__: None"
    code = f"{nothing_found}; from megatronish.ops import build; sys.exit(build.main())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("CUDA's compiler nvcc is not here") and "Traceback" not in done.stderr


def test_torch_is_found_where_it_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    headers = tmp_path / "torch" / "include" / "torch" / "csrc" / "stable"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(BuildError, match=r"built against torch's headers: install torch 2\.11 or newer first"):
        build.find_torch()
    headers.mkdir(parents=True)
    assert build.find_torch() == tmp_path / "torch"


def test_registers_and_spills_are_read_from_the_compiler() -> None:
    found = build._kernels(LOG)
    name = found[0].name
    assert found == [Kernel(name, "sm_80", 40, 256, 16), Kernel(name, "sm_100", 38, 0, 0)]
    assert build.table(found).splitlines() == [
        "registers on sm_80, sm_100; bytes of static shared memory, and spilled",
        f"  40  38    256     16  {name}",
    ]


@pytest.mark.parametrize(("spilled", "status"), [(0, 0), (16, 1)])
def test_a_spill_is_a_failure(spilled: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_cuda", lambda _: [Kernel("add", "sm_80", 40, 0, spilled)])
    monkeypatch.setattr(build, "_run", lambda _: "")
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.main() == status


def test_every_family_has_its_line_and_its_sources() -> None:
    assert [line.partition(":")[0] for line in report.kernels_report("cpu")] == [each.name for each in report.FAMILIES]
    assert sorted(path.stem for path in build.kernel_sources()) == sorted(each.name for each in report.FAMILIES)


@pytest.mark.usefixtures("fresh_library")
def test_a_run_says_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "kernels_cuda.so"
    monkeypatch.setattr(library, "LIBRARY", path)
    assert report.kernels_report("cpu")[0] == "softmax: torch, because the kernels are for CUDA and this runs on cpu"
    built = "the kernels are not built: python setup.py build_ext --inplace"
    assert report.kernels_report("cuda")[0] == f"softmax: torch, because {built}"

    library.load_kernels.cache_clear()
    path.write_text("no library")
    assert report.kernels_report("cuda")[0].startswith(f"softmax: torch, because {path} does not load: ")

    library.load_kernels.cache_clear()
    monkeypatch.setenv("MEGATRONISH_KERNELS", "0")
    assert report.kernels_report("cuda")[0] == "softmax: torch, because MEGATRONISH_KERNELS is 0"


@pytest.mark.usefixtures("fresh_library")
def test_a_library_of_another_version_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "kernels_cuda.so")
    library.LIBRARY.touch()
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, _: "masked" not in name)
    absent = "megatronish::scaled_masked_softmax, megatronish::scaled_masked_softmax_backward"
    expected = f"softmax: torch, because kernels_cuda.so has no {absent}: build it again"
    assert report.kernels_report("cuda")[0] == expected
