"""What an error says."""

from __future__ import annotations

import pytest

from mxdist.errors import MxdistError


@pytest.mark.parametrize(
    ("message", "hint", "said"),
    [
        ("it broke.", "", "it broke."),
        ("it broke.", "Mend it.", "it broke. Mend it."),
        ("No such file or directory", "Check free space.", "No such file or directory. Check free space."),
        ("No module named 'pydantic'\n", "Check it.", "No module named 'pydantic'. Check it."),
        ("2 problems:\n  a", "\nMend them.", "2 problems:\n  a \nMend them."),
    ],
)
def test_a_hint_begins_a_new_sentence(message: str, hint: str, said: str) -> None:
    assert str(MxdistError(message, hint=hint)) == said
