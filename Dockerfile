# A worker (and, with another entry point, Flower). torch from PyPI brings its own CUDA libraries,
# so a slim Python is all that has to lie under it; the host brings the driver.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md ./
COPY llorch_worker llorch_worker
COPY tasks tasks
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# Another index for a CPU-only image: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=https://pypi.org/simple
ENV PYTHONUNBUFFERED=1
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --index-url "$TORCH_INDEX" "torch>=2.11,<2.14"
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache/pip \
    wheel=$(ls /wheels/*.whl) && pip install "${wheel}[worker,flower]"
RUN useradd --create-home --uid 10001 llorch
USER llorch
WORKDIR /home/llorch
STOPSIGNAL SIGTERM
ENTRYPOINT ["llorch"]
CMD ["worker"]
