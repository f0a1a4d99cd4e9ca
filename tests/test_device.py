"""Device facts: every figure has a kind and a source."""

from pathlib import Path

import pytest

from moeplan.cost.device import devices, load_device, read_device
from moeplan.errors import MoeplanError
from moeplan.store import Store

GOOD = 'name = "toy"\ntitle = "A toy"\n[read_bandwidth]\nvalue = 1e9\nkind = "measured"\nsource = "here"\n'


def write(root: Path, text: str, name: str = "toy") -> Path:
    path = root / name / "device.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_every_shipped_device_is_sound() -> None:
    names = devices(Store())
    assert "m1-ultra" in names
    for name in names:
        device = load_device(Store(), name)
        assert device.name == name
        assert device.read_bandwidth is not None, name


def test_reads_facts(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    device = load_device(Store(calibration=tmp_path), "toy")
    assert device.title == "A toy"
    assert device.read_bandwidth is not None
    assert (device.read_bandwidth.value, device.read_bandwidth.kind) == (1e9, "measured")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("1e9", "-1"), r"read_bandwidth\.value -1 is not a positive number"),
        (GOOD.replace("1e9", "true"), r"read_bandwidth\.value True is not"),
        (GOOD.replace("measured", "guessed"), r"read_bandwidth\.kind 'guessed' is none of"),
        (GOOD.replace('source = "here"', ""), r"read_bandwidth\.source is missing"),
        (GOOD.replace('"toy"', '"other"'), "name 'other' is not the folder's name 'toy'"),
        ("name = ", "device.toml"),
    ],
)
def test_wrong_facts_name_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(MoeplanError, match=message) as caught:
        read_device(path)
    assert str(path) in str(caught.value)


def test_unknown_device_lists_the_known(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(MoeplanError, match=r"--device nothing: no such device \(known: .*m1-ultra.*toy"):
        load_device(Store(calibration=tmp_path), "nothing")
