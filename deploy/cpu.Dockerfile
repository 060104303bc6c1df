# vLLM for CPUs with sgl-vllm, as pinned and tested in this repository. Build it at the root of a
# checkout:
#     pip wheel --no-deps --wheel-dir dist .
#     docker build -f deploy/cpu.Dockerfile -t sgl-vllm:0.1.0-cpu .
FROM python:3.11-slim-bookworm

# vLLM loads libnuma; torch.compile needs a compiler, unless --enforce-eager is given.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

# Where the CPU build of torch is, if the first index of pip has none.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints /tmp/constraints/
RUN pip install --no-cache-dir --no-deps --requirement /tmp/constraints/torch-cpu.txt \
        --extra-index-url "${TORCH_INDEX}" \
    && pip install --no-cache-dir --no-deps --requirement /tmp/constraints/cpu.txt

COPY dist/*.whl /tmp/wheels/
# `doctor --fix` adds the package metadata that `vllm serve` looks for.
RUN pip install --no-cache-dir --no-deps /tmp/wheels/sgl_vllm-*.whl \
    && sgl-vllm doctor --fix \
    && rm -r /tmp/wheels /tmp/constraints \
    && useradd --create-home --uid 1000 server

USER 1000
RUN python3 -m sgl_vllm.fsm.warm_up
ENV VLLM_CPU_KVCACHE_SPACE=1
EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]
CMD ["/usr/local/lib/python3.11/site-packages/sgl_vllm/demo/model", \
    "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager", \
    "--max-model-len", "2048", "--plugin", "sgl_vllm"]
