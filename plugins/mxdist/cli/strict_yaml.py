"""YAML, but a key that stands twice in a mapping is an error, not a choice."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load(text: str, name: str) -> Any:
    """Return the value of a YAML document.

    :param name: what errors call it.
    :raises yaml.YAMLError: it is none, or a key stands twice.
    """
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
