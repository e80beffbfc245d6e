"""Files of settings: values with their lines, and errors with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.system.settings import Setting, read_settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [x, x]\nb: [*a, *a]\n", "aliases (*name) and deep nesting"),
        ("epochs: " + "[" * 9000, "aliases (*name) and deep nesting"),
        ("# comment\n" * 2000, "more than 16,384 bytes"),
        ("seed: 3\nmodel: [unclosed\n", " (while parsing a flow sequence of line 2)"),
        ('a: "b\nc: 2\n', " (while scanning a quoted scalar of line 1)"),
        ("a: 1\n\tb: 2\n", "line 2: found character "),
        ("a: 1\nb: 2\na: 3\n", "line 3: a: line 1 "),
        ("a-b: 1\na_b: 3\n", "line 2: a_b: line 1 "),
        ("just words\n", "line 1: expected lines such as `seed: 1`"),
        ("a: \x07", "special characters are not allowed"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        read_settings(path, "seed: 1")
    assert str(refused.value).startswith(str(path))
    assert words in str(refused.value)


def test_each_setting_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "# first\nseed: 3\n\nlr-milestones:\n- 30\n- 60.5\n5: True\na: 'true'\nb:\nc: 20:40\n"
    )
    assert read_settings(path, "") == [
        Setting("seed", "3", 2),
        Setting("lr-milestones", ["30", "60.5"], 4),
        Setting("5", True, 7),
        Setting("a", "true", 8),
        Setting("b", None, 9),
        Setting("c", "20:40", 10),
    ]
