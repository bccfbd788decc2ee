# A node with NVIDIA GPUs: mxnet-cu112, CUDA 11, cuDNN 8, NCCL 2, Horovod over NCCL, MPI and Gloo, and sshd.
# Build it from the top of the checkout: docker build -f docker/node-cu112.Dockerfile -t mxdist-node-cu112 .
# CUDA's compiler stays in the first stage; the libraries that MXNet loads are those of requirements-node-cu112.txt.
FROM ghcr.io/astral-sh/uv:0.13.9 AS uv

FROM nvidia/cuda:11.2.2-cudnn8-devel-ubuntu20.04 AS wheel
# The release of Ubuntu pins its packages. NVIDIA's list is not needed, and its old key no longer holds.
# hadolint ignore=DL3008
RUN rm -f /etc/apt/sources.list.d/cuda.list /etc/apt/sources.list.d/nvidia-ml.list \
    && apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ libgomp1 libopenmpi-dev libquadmath0 make openmpi-bin \
    && rm -rf /var/lib/apt/lists/*
COPY --from=uv /uv /usr/local/bin/uv
# MXNet is imported while Horovod is compiled, and wants the driver's library: the toolkit's stub stands in for it.
RUN ln -s libcuda.so /usr/local/cuda/lib64/stubs/libcuda.so.1
ENV UV_NO_CACHE=1 \
    LD_LIBRARY_PATH=/usr/local/cuda/lib64:/usr/local/cuda/lib64/stubs \
    HOROVOD_CUDA_HOME=/usr/local/cuda
WORKDIR /build
COPY requirements-node-cu112.txt requirements-horovod.txt ./
COPY scripts/horovod_wheel.py scripts/steps.py scripts/
COPY scripts/envs scripts/envs
RUN uv python install 3.11.15 \
    && uv run --no-project --python 3.11.15 scripts/horovod_wheel.py \
        --requirements requirements-node-cu112.txt --into wheels

FROM python:3.11.13-slim-bookworm AS build
COPY --from=uv /uv /usr/local/bin/uv
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
WORKDIR /build
COPY --from=wheel /build/wheels wheels
COPY requirements-node-cu112.txt ./
RUN uv venv -q --python 3.11 /opt/node \
    && uv pip install -q --python /opt/node/bin/python -r requirements-node-cu112.txt wheels/*.whl
COPY pyproject.toml README.md LICENSE requirements.txt ./
COPY plugins plugins
RUN uv pip install -q --python /opt/node/bin/python --no-deps --build-constraints requirements.txt .

FROM python:3.11.13-slim-bookworm
# Host keys made while an image is built would be the same on every node. The password '*' fits none, and does not lock.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        libgomp1 libopenmpi3 libquadmath0 openmpi-bin openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --uid 1000 --create-home --shell /bin/bash --password '*' mxdist \
    && install -d -o mxdist -g mxdist /var/lib/mxdist /var/lib/mxdist/jobs /var/lib/mxdist/ssh \
        /var/lib/mxdist/known_hosts
COPY --from=build /opt/node /opt/node
# By ldconfig and not by LD_LIBRARY_PATH, which a command over ssh would not have.
RUN ls -d /opt/node/lib/python3.11/site-packages/nvidia/*/lib >/etc/ld.so.conf.d/mxdist.conf && ldconfig
COPY docker/sshd_config /etc/ssh/mxdist_sshd_config
COPY docker/node-sshd docker/with-secrets /usr/local/bin/
ENV PATH=/opt/node/bin:/usr/local/bin:/usr/bin:/bin \
    MXDIST_NODE_PYTHON=/opt/node/bin/python \
    MXDIST_WORKDIR=/var/lib/mxdist/jobs \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
WORKDIR /home/mxdist
USER 1000:1000
EXPOSE 2222
ENTRYPOINT ["with-secrets"]
CMD ["node-sshd"]
