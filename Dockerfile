# Image with the checkout in /workspace and the command `megatronish`, for CPUs or for CUDA:
#   docker build --tag megatronish:0.2.0 .
#   docker build --tag megatronish:0.2.0-cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
# torch of PyPI brings CUDA's libraries with it, so both have the same small base; the driver is the host's.
FROM python:3.12.8-slim-bookworm

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# A compiler: dropout and windows have parts in C++ that are built at the first use. Debian's mirrors keep no older
# version of a package, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 trainer \
    && install --directory --owner trainer /workspace

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# torch and what it needs change seldom: they are a layer of their own.
COPY requirements.txt /tmp/requirements.txt
RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' /tmp/requirements.txt)" \
    && pip install --constraint /tmp/requirements.txt setuptools

WORKDIR /workspace
COPY --chown=trainer . .
RUN pip install --no-build-isolation --constraint requirements.txt ".[serve,s3,yaml,zstd,parquet]" \
    && rm -rf build ./*.egg-info

# trainer, as a number: Kubernetes looks at it under runAsNonRoot.
USER 1000
ENTRYPOINT ["megatronish"]
CMD ["--help"]
