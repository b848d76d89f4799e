# Meterhouse on CPU. Run: see compose.yaml. Build, with PyTorch's index of CPU builds (see pytorch.org/get-started):
#   docker build --build-arg TORCH_INDEX=… -t meterhouse:0.1.0 .
FROM python:3.11-slim AS build
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /app/.venv
# PyTorch first and by itself: it is most of the image and changes least.
RUN /app/.venv/bin/pip install --extra-index-url "${TORCH_INDEX:?name the index of CPU builds of PyTorch}" "torch==${TORCH_VERSION}+cpu"
WORKDIR /app
COPY . .
RUN /app/.venv/bin/pip install -c constraints.txt -e ".[postgres]"

FROM python:3.11-slim
# The first start compiles the CPU kernels for the processor it runs on; the cache keeps them.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home meterhouse \
    && install -d -o meterhouse -g meterhouse -m 0700 /data /cache
COPY --from=build /app /app
ENV PATH=/app/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    METERHOUSE_HOST=0.0.0.0 \
    METERHOUSE_PORT=8000 \
    METERHOUSE_DATA_DIR=/data \
    METERHOUSE_CACHE_DIR=/cache \
    METERHOUSE_LOG_FORMAT=json
USER meterhouse
WORKDIR /home/meterhouse
VOLUME ["/data", "/cache"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# The first start fetches and converts the model, hence the long start period.
HEALTHCHECK --interval=10s --timeout=15s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/ready', timeout=14)"]
ENTRYPOINT ["meterhouse"]
CMD ["serve"]
