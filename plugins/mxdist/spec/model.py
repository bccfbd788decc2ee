"""What is trained: a network by name, a recipe of the user's own, or a script as it is."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, ValidationInfo, field_validator

from mxdist.spec.base import Spec
from mxdist.spec.networks import NETWORKS, Scalar, cast_params, unknown, wrong_params

_OURS = ("HOROVOD_", "MXDIST_", "DMLC_")
_ONLY_WATCH = {"HOROVOD_LOG_HIDE_TIME", "HOROVOD_LOG_LEVEL", "HOROVOD_TIMELINE", "HOROVOD_TIMELINE_MARK_CYCLES"}
"""Of these names, what changes nothing of how ranks meet and work."""


class Model(Spec):
    """A network by name, or a recipe: a Python file or module of the user's own.

    A recipe defines ``network(params)`` and, as it likes, ``data(folder, split, params)``, ``loss(params)`` and
    ``metrics(params)``; ``runtime/recipe.py`` describes each.
    """

    name: str | None = Field(None, description="A network of mxdist or of MXNet's model zoo: see models.md.")
    recipe: str | None = Field(None, description="A recipe: path/to/file.py or package.module.")
    params: dict[str, Scalar] = Field(default_factory=dict, description="Hyperparameters of the network.")

    @field_validator("name")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in NETWORKS:
            raise ValueError(unknown(name))
        return name

    @field_validator("recipe")
    @classmethod
    def _one_source(cls, recipe: str | None, info: ValidationInfo) -> str | None:
        if "name" in info.data and (info.data["name"] is None) == (recipe is None):
            raise ValueError("give either name or recipe")
        return recipe

    @field_validator("params")
    @classmethod
    def _fit_the_network(cls, params: dict[str, Scalar], info: ValidationInfo) -> dict[str, Scalar]:
        name = info.data.get("name")
        if name is None:
            return params
        params = cast_params(name, params)
        problems = wrong_params(name, params)
        if problems:
            raise ValueError("; ".join(f"{key}: {problem}" for key, problem in problems.items()))
        return params


class Script(Spec):
    """An existing MXNet/Horovod script, started unchanged on every rank."""

    path: str = Field(min_length=1, description="The script, as seen from where the job is submitted.")
    args: tuple[str, ...] = Field((), description="Its arguments; nothing here is secret, `ps` shows them.")
    env: dict[str, str] = Field(default_factory=dict, description="Extra environment; nothing here is secret.")

    @field_validator("path")
    @classmethod
    def _can_be_a_path(cls, path: str) -> str:
        if "\0" in path:
            raise ValueError("must not contain NUL")
        return path

    @field_validator("args")
    @classmethod
    def _can_be_arguments(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [str(index) for index, argument in enumerate(args) if "\0" in argument]
        if wrong:
            raise ValueError(f"must not contain NUL (at {', '.join(wrong)})")
        return args

    @field_validator("env")
    @classmethod
    def _can_be_an_environment(cls, env: dict[str, str]) -> dict[str, str]:
        wrong = [name for name, value in env.items() if not name or "=" in name or "\0" in name + value]
        ours = sorted(name for name in env if name.startswith(_OURS) and name not in _ONLY_WATCH)
        problems = []
        if wrong:
            problems.append(f"names must not be empty or contain '=', nothing may contain NUL: {wrong}")
        if ours:
            problems.append(f"mxdist sets these itself, so they cannot be given here: {', '.join(ours)}")
        if problems:
            raise ValueError("; ".join(problems))
        return env


class Head(StrEnum):
    """What happens to the output layer when training starts from another model."""

    KEEP = "keep"
    REPLACE = "replace"


class Init(Spec):
    """Start from the weights of an earlier training (transfer learning, fine-tuning)."""

    model_uri: str = Field(min_length=1, description="The exported model: a folder of the run store, by its URI.")
    head: Head = Field(Head.KEEP, description="keep: same classes; replace: a new output layer.")
    freeze_backbone: bool = Field(False, description="Train the head alone; the rest keeps weights and statistics.")
    freeze: tuple[str, ...] = Field((), description="Regular expressions of parameter names to freeze as well.")
    reuse_head: bool = Field(False, description="Keep the head although the label map differs: say so on purpose.")
