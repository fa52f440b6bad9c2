"""Installation of `megatronish`: the package, its command and what it needs. Tool settings are in pyproject.toml.

All of it is Python, unless the CUDA kernels are asked for: `python setup.py build_ext --inplace`, or an installation
with MEGATRONISH_BUILD_KERNELS=1. Then one shared library is built and lies in megatronish/ops.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from megatronish import __version__
from megatronish.ops.build import BuildError, build_cuda

ROOT = Path(__file__).parent


class BuildKernels(build_ext):
    """The library of kernels is loaded by torch and is no module of Python, so its name has no version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """`megatronish/ops/kernels_cuda.so`."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """See megatronish/ops/build.py."""
        try:
            build_cuda(Path(self.get_ext_fullpath(ext.name)).absolute())
        except BuildError as error:
            sys.exit(f"error: {error}")


class BuildPackage(build_py):
    """Puts configs/ and recipes/ into the package for config/shipped.py; an editable installation has the folders.

    The questions of `megatronish judge` lie there, too.
    """

    def run(self) -> None:
        """Copy the modules, and then the configs, recipes and questions."""
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "megatronish"
            for name in ("configs", "recipes"):
                shutil.copytree(ROOT / name, package / name, dirs_exist_ok=True)
            shutil.copy2(ROOT / "examples" / "judge_questions.jsonl", package / "configs")


def description_for_an_index() -> str:
    """README.md without pictures and without the links into the repository, which lead nowhere on a package index."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https?://)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?://)[^)]*\)", r"\1", text)


kernels_wanted = "build_ext" in sys.argv or os.environ.get("MEGATRONISH_BUILD_KERNELS", "0") not in ("", "0")

setup(
    name="megatronish",
    version=__version__,
    description="A 3D-parallel transformer training framework: every layout of ranks trains the same model",
    long_description=description_for_an_index(),
    long_description_content_type="text/markdown",
    author="the megatronish developers",
    keywords="transformer, language model, training, data parallel, tensor parallel, pipeline parallel, PyTorch",
    license_expression="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatronish", "megatronish.*"]),
    package_data={
        "megatronish": [
            "__init__.pyi",
            "py.typed",
            "ops/dropout.cpp",
            "ops/floats.h",
            "ops/windowed.cpp",
            "dry_run/fake_cuda.cpp",
            "data/chat/templates/*.jinja",
            "inference/chat_page.html",
            "report/page/page.*",
            "report/page/uplot/*",
            "estimate/planner/*.toml",
        ],
    },
    ext_modules=[Extension("megatronish.ops.kernels_cuda", sources=[])] if kernels_wanted else [],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
    python_requires=">=3.11",
    entry_points={"console_scripts": ["megatronish = megatronish.__main__:main"]},
    # Ranges here, the versions of development in requirements.txt.
    install_requires=[
        "torch>=2.11",
        "numpy>=2.0",
        "einops>=0.8",
        "jinja2>=3.1",
        "sentencepiece>=0.2",
        "tokenizers>=0.20",
        "tensorboard>=2.16",
        "tqdm>=4.66",
        "rich>=13.0",
        "matplotlib>=3.8",
        "tyro>=1.0",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-xdist>=3.6", "ruff", "mypy", "safetensors>=0.4", "PyYAML>=6", "uvicorn>=0.30"],
        "yaml": ["PyYAML>=6"],  # megatronish from-axolotl
        "zstd": ["zstandard>=0.21"],  # .zst files to preprocess; Python 3.14 reads them by itself
        "parquet": ["pyarrow>=15"],  # .parquet files to preprocess
        "tiktoken": ["tiktoken>=0.9"],  # byte-level BPE in megatronish preprocess, several times as fast
        "language": ["py3langid>=0.4", "fasttext-predict>=0.9.2"],  # megatronish preprocess --filter-language
        "s3": ["fsspec>=2024.6", "s3fs>=2024.6"],  # --save s3://..., --load s3://...
        "serve": ["fastapi>=0.115", "uvicorn>=0.30"],  # megatronish serve
        "eval": ["lm_eval>=0.4.9,<0.5"],  # megatronish evaluate --tasks
        "wandb": ["wandb>=0.20"],
        # The small MLflow has no database: SQLAlchemy and Alembic are what its SQLite store needs.
        "mlflow": ["mlflow-skinny>=2.14", "sqlalchemy>=2.0", "alembic>=1.13"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
