"""What is installed as `megatronish`, and what does it need? Tool settings are in pyproject.toml.

All of it is Python, unless the CUDA kernels are asked for: `python setup.py build_ext --inplace`, or an installation
with MEGATRONISH_BUILD_KERNELS=1. Then one shared library is built and lies in megatronish/ops.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))

from megatronish.ops.build import BuildError, build_cuda


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


kernels_wanted = "build_ext" in sys.argv or os.environ.get("MEGATRONISH_BUILD_KERNELS", "0") not in ("", "0")

setup(
    name="megatronish",
    version="0.1.0",
    description="A 3D-parallel transformer training framework: every layout of ranks trains the same model",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatronish", "megatronish.*"]),
    ext_modules=[Extension("megatronish.ops.kernels_cuda", sources=[])] if kernels_wanted else [],
    cmdclass={"build_ext": BuildKernels},
    python_requires=">=3.11",
    # Ranges here, the versions of development in requirements.txt.
    install_requires=[
        "torch>=2.11",
        "numpy>=2.0",
        "einops>=0.8",
        "sentencepiece>=0.2",
        "tokenizers>=0.20",
        "tensorboard>=2.16",
        "tqdm>=4.66",
        "matplotlib>=3.8",
        "tyro>=1.0",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-xdist>=3.6", "ruff", "mypy", "safetensors>=0.4"],
        "wandb": ["wandb>=0.20"],
        # The small MLflow has no database: SQLAlchemy and Alembic are what its SQLite store needs.
        "mlflow": ["mlflow-skinny>=2.14", "sqlalchemy>=2.0", "alembic>=1.13"],
    },
    classifiers=[
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
