# hybridrl on NVIDIA GPUs, with vLLM. Build in the project's root, run with GPUs and room in /dev/shm:
#   docker build -f docker/gpu.Dockerfile -t hybridrl:gpu .
#   docker run --rm --gpus all --shm-size 16g --ulimit memlock=-1 --ulimit nofile=65536 hybridrl:gpu check --cluster
# Parts that change least come first, so that a change of the sources installs only them again.
# The image has nvcc, by which hybridrl._C is built.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-venv python3.12-dev git \
       openssh-client iproute2 procps libibverbs1 ibverbs-providers libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# torch alone: the largest part, and the one that changes least. The versions are those that ran on H100 and H200.
RUN pip install torch==2.11.0

RUN pip install torch==2.11.0 vllm==0.26.0

# What hybridrl needs, by its table; the sources are not looked at.
COPY hybridrl/config/packages.py /build/packages.py
RUN python -c "import runpy; t = runpy.run_path('/build/packages.py'); print('\n'.join(n + b for n, b in t['REQUIRED'].items()))" \
    > /build/required.txt && pip install -r /build/required.txt torch==2.11.0 megatron-core==0.16.1 \
       setuptools wheel ninja

COPY setup.py pyproject.toml MANIFEST.in README.md LICENSE /opt/hybridrl/
COPY csrc /opt/hybridrl/csrc
COPY kernels /opt/hybridrl/kernels
COPY examples /opt/hybridrl/examples
COPY hybridrl /opt/hybridrl/hybridrl
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist /opt/hybridrl && pip install --no-deps /dist/*.whl \
    && rm -r /opt/hybridrl && hybridrl --version

WORKDIR /work
ENTRYPOINT ["hybridrl"]
CMD ["check", "--cluster"]
