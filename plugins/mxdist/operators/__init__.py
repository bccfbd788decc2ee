"""Airflow operators: check, submit, wait without a worker, hand back a small dict. No logic of their own."""
