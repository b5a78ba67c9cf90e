# A worker, a gateway (`gateway`) and, with another entry point, Flower. torch brings its own CUDA libraries, so a slim
# Python and a C compiler are all that has to lie under it; the host brings the driver.
FROM python:3.12-slim AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
COPY pyproject.toml README.md ./
COPY llorch_worker llorch_worker
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# pip's own variables, for an index of yours or a torch without CUDA: --build-arg PIP_INDEX_URL=...
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PYTHONUNBUFFERED=1
# Triton compiles the launchers of its kernels where they run; the kernels for CPUs are compiled below.
# tini passes signals on: the first process of a container ignores SIGTERM until Python has started.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*
# A layer of its own: torch is most of the image, and changes least.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install "torch>=2.11,<2.14"
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache/pip \
    wheel=$(ls /wheels/*.whl) && pip install "${wheel}[worker,server,gateway,flower,metrics,otel]"
# A volume that is mounted on one of these folders takes its owner over when it is made.
RUN useradd --create-home --uid 10001 llorch \
    && install --directory --owner llorch --mode 1777 /var/lib/llorch/devices \
    && install --directory --owner llorch /var/lib/llorch/kernels \
    && install --directory --owner llorch /var/lib/llorch/hub \
    && install --directory --owner llorch /var/lib/llorch/files \
    && install --directory --owner llorch /var/lib/llorch/flower
ENV TRITON_CACHE_DIR=/var/lib/llorch/kernels
# Where the models of hf:OWNER/NAME are kept.
ENV HF_HOME=/var/lib/llorch/hub
# The kernels for all CPUs of this architecture, so that no container compiles them.
ENV XDG_CACHE_HOME=/var/cache/llorch
RUN python -m llorch_worker.kernels.native && chown --recursive llorch /var/cache/llorch
# By number, so that Kubernetes knows that it is not root.
USER 10001
WORKDIR /home/llorch
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "llorch"]
CMD ["worker"]
