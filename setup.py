"""What is installed as `megatronish`, and what does it need? Tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megatronish",
    version="0.1.0",
    description="A 3D-parallel transformer training framework: every layout of ranks trains the same model",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatronish", "megatronish.*"]),
    python_requires=">=3.11",
    # Ranges here, the versions of development in requirements.txt. All of it is Python: nothing is built against torch.
    install_requires=[
        "torch>=2.11",
        "numpy>=2.0",
        "einops>=0.8",
        "sentencepiece>=0.2",
        "tokenizers>=0.20",
        "safetensors>=0.4",  # for the conversion of checkpoints, which is to come
        "tensorboard>=2.16",
        "tqdm>=4.66",
        "matplotlib>=3.8",
        "tyro>=1.0",
    ],
    extras_require={"test": ["pytest>=8", "ruff", "mypy"]},
    classifiers=[
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
