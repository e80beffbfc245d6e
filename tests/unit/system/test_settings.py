"""Files of settings: values with their lines, and errors with their lines."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.system.settings import Setting, read_settings

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]\n" for name in "bcdefghij"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "line 2: *a: "),
        ("epochs: " + "[" * 9000, "line 1: nested too deeply"),
        ("- " * 8000 + "x", "line 1: nested too deeply"),
        ("seed: " + "9" * 6000, "line 1: a value of 6,000 characters"),
        ("# comment\n" * 2000, "more than 16,384 bytes"),
        ("seed: !!int ''", "string index out of range"),
        ("when: 2001-99-99", "month must be in 1..12"),
        ("seed: 3\nmodel: [unclosed\n", "settings.yaml line 2: '[' is not closed"),
        ("a: [1\nb: 2\nc: 3\n", "settings.yaml line 1: '[' is not closed"),
        ("a: {b: 2\n", "settings.yaml line 1: '{' is not closed"),
        ('a: "b\nc: 2\n', "settings.yaml line 1: '\"' is not closed"),
        ("{", "settings.yaml line 1: '{' is not closed"),
        ("a: 1\nb: [1,\n", "settings.yaml line 2: '[' is not closed"),
        ("a: [1, {b: 2, c: [3]\n", "settings.yaml line 1: '{' is not closed"),
        ("a: 1\nb: [1, @x]\n", "settings.yaml line 2: found character '@' that cannot start any"),
        ("a: ]\n", "settings.yaml line 1: "),
        ("a: 1\n\tb: 2\n", "settings.yaml line 2: "),
        ("a: 1\nb: 2\na: 3\n", "settings.yaml line 3: a: line 1 "),
        ("a-b: 1\na_b: 3\n", "settings.yaml line 2: a_b: line 1 "),
        ("just words\n", "settings.yaml line 1: expected lines such as `seed: 1`"),
        ("a: 1\n--- \nb: 2\n", "but found another document"),
        ("a: \x07", "special characters are not allowed"),
        ("!" * 9000, "`seed: 1`"),
        ("a: " + "!" * 9000, "could not determine a constructor"),
    ],
)
def test_hostile_settings_are_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        read_settings(path, "seed: 1")
    assert words in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


@given(st.text("[]{}:,-#\"'&*!|>@ \n\tab1", max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with contextlib.suppress(UsageError):
        read_settings(path, "seed: 1")


def test_each_setting_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("# first\nseed: 3\n\nlr-milestones:\n- 30\n- 60.5\n5: yes\n")
    assert read_settings(path, "") == [
        Setting("seed", 3, 2),
        Setting("lr-milestones", [30, 60.5], 4),
        Setting("5", True, 7),
    ]
