"""Buttons on a task's page that lead to MLflow."""
