# Airflow and MLflow with mxdist, and SeaweedFS: every service of compose.yaml but the nodes, PostgreSQL and Redis.
# Build it from the top of the checkout: docker build -f docker/control.Dockerfile -t mxdist-control .
FROM ghcr.io/astral-sh/uv:0.13.9 AS uv

FROM python:3.11.13-slim-bookworm AS build
COPY --from=uv /uv /usr/local/bin/uv
# Compiled here, because the user of the image cannot write beside the code.
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
WORKDIR /build
COPY requirements.txt requirements-docker.txt ./
RUN uv venv -q --python 3.11 /opt/control \
    && uv pip install -q --python /opt/control/bin/python -r requirements.txt -r requirements-docker.txt
COPY pyproject.toml README.md LICENSE ./
COPY plugins plugins
RUN uv pip install -q --python /opt/control/bin/python --no-deps --no-build-isolation .

FROM python:3.11.13-slim-bookworm
RUN useradd --uid 1000 --create-home mxdist \
    && install -d -o mxdist -g mxdist /opt/airflow /opt/airflow/logs /opt/airflow/plugins /var/lib/seaweedfs \
        /var/lib/mlflow /var/lib/mxdist /var/lib/mxdist/known_hosts
COPY --from=build /opt/control /opt/control
COPY docker/with-secrets /usr/local/bin/with-secrets
ENV PATH=/opt/control/bin:/usr/local/bin:/usr/bin:/bin \
    AIRFLOW_HOME=/opt/airflow \
    PYTHONUNBUFFERED=1
WORKDIR /opt/airflow
USER 1000:1000
RUN python -c "from mxdist.provider import get_provider_info; import airflow, asyncpg, celery, mlflow, psycopg2, redis"
ENTRYPOINT ["with-secrets"]
CMD ["airflow", "version"]
