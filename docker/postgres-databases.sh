#!/bin/sh
# Run by PostgreSQL's image once, when its volume is empty.
set -eu
for name in airflow mlflow; do
    createdb --username "$POSTGRES_USER" --owner "$POSTGRES_USER" "$name"
done
