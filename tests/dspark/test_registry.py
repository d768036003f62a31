import pytest

from dspark.registry import Registry, SettingError


def test_a_registry_knows_its_parts_by_name() -> None:
    parts = Registry[type]("colour", option="paint.colour")

    @parts.register("red")
    class Red: ...

    assert parts["red"] is Red
    assert list(parts) == ["red"]
    assert parts.register("red")(Red) is Red
    with pytest.raises(ValueError, match="the colour 'red' is taken by"):
        parts.register("red")(int)
    with pytest.raises(SettingError, match=r"no colour 'reed'; did you mean red\? known are red \(option"):
        parts["reed"]
