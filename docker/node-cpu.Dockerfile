# A node without GPU: MXNet, Horovod over Gloo, and an sshd that runs as the user who trains.
# Build it from the top of the checkout: docker build -f docker/node-cpu.Dockerfile -t mxdist-node-cpu .
FROM ghcr.io/astral-sh/uv:0.13.9 AS uv

FROM python:3.11.13-slim-bookworm AS build
# The release of Debian pins its packages; a point release removes older ones, so versions here would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 libquadmath0 make \
    && rm -rf /var/lib/apt/lists/*
COPY --from=uv /uv /usr/local/bin/uv
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
WORKDIR /build
COPY requirements-node.txt requirements-horovod.txt ./
COPY scripts/horovod_wheel.py scripts/steps.py scripts/
COPY scripts/envs scripts/envs
RUN python scripts/horovod_wheel.py --requirements requirements-node.txt --into wheels
RUN uv venv -q --python 3.11 /opt/node \
    && uv pip install -q --python /opt/node/bin/python -r requirements-node.txt wheels/*.whl
COPY pyproject.toml README.md LICENSE requirements.txt ./
COPY plugins plugins
RUN uv pip install -q --python /opt/node/bin/python --no-deps --build-constraints requirements.txt .

FROM python:3.11.13-slim-bookworm
# Host keys made while an image is built would be the same on every node. The password '*' fits none, and does not lock.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 libquadmath0 openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --uid 1000 --create-home --shell /bin/bash --password '*' mxdist \
    && install -d -o mxdist -g mxdist /var/lib/mxdist /var/lib/mxdist/jobs /var/lib/mxdist/ssh \
        /var/lib/mxdist/known_hosts
COPY --from=build /opt/node /opt/node
COPY docker/sshd_config /etc/ssh/mxdist_sshd_config
COPY docker/node-sshd docker/with-secrets /usr/local/bin/
ENV PATH=/opt/node/bin:/usr/local/bin:/usr/bin:/bin \
    MXDIST_NODE_PYTHON=/opt/node/bin/python \
    MXDIST_WORKDIR=/var/lib/mxdist/jobs \
    PYTHONUNBUFFERED=1
WORKDIR /home/mxdist
USER 1000:1000
RUN python -c "import horovod.mxnet as hvd; assert hvd.gloo_built()"
EXPOSE 2222
ENTRYPOINT ["with-secrets"]
CMD ["node-sshd"]
