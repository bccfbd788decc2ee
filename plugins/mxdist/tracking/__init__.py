"""MLflow: a journal that training writes, and all that carries it onward. Training never waits for any of it."""
