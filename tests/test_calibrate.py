"""Calibrations on disk: found by device, engine and shape; fits stored and regenerated; the commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeplan.cost.calibrate import Calibration, load_calibration, write_fits
from moeplan.cost.model import Drivers
from moeplan.errors import MoeplanError
from moeplan.store import Store
from tests.cost_samples import sample, samples, shape, write_journal

ROOT = Path(__file__).resolve().parent.parent
DEVICE = 'name = "toy"\n[read_bandwidth]\nvalue = 1e12\nkind = "measured"\nsource = "made up"\n'


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two versions of one engine on one device; the older one also has a second shape."""
    root = tmp_path / "calibration"
    for version, plane in (("0.9", 3e-6), ("0.10", 2e-6)):
        arms = samples(lambda n, u, s, plane=plane: 30e-6 + plane * u, counts=(1, 2, 4, 8))
        write_journal(root / f"toy/mlx-{version}/moe.jsonl", arms, engine_version=version)
    wide = [sample("gather", n, "uniform", 1e-5 * n, shape=shape(hidden=4096)) for n in (1, 2)]
    write_journal(root / "toy/mlx-0.9/wide.jsonl", wide, engine_version="0.9")
    (root / "toy/device.toml").write_text(DEVICE)
    return Store(calibration=root)


def plane_seconds(calibration: Calibration) -> float:
    return calibration.fits["gather"].curve.pieces[0].law.coefficients[1]


def test_newest_version_with_the_shape_is_taken(store: Store) -> None:
    newest = load_calibration(store, "toy", "mlx", shape())
    assert (newest.engine, newest.engine_version, newest.where) == ("mlx", "0.10", "toy/mlx-0.10")
    assert plane_seconds(newest) == pytest.approx(2e-6, rel=1e-4)
    older = load_calibration(store, "toy", "mlx-0.9", shape())
    assert plane_seconds(older) == pytest.approx(3e-6, rel=1e-4)
    assert load_calibration(store, "toy", "mlx", shape(hidden=4096)).engine_version == "0.9"


@pytest.mark.parametrize(
    ("device", "engine", "hidden", "message"),
    [
        ("nowhere", "mlx", 2048, r"--device nowhere: no such device \(known: .*m1-ultra.*toy"),
        ("toy", "mlx", 1024, r"no mlx calibration of 128x8 experts, 1024x768.*there are: mlx-0.10 128x8 .*4096x768"),
        ("toy", "triton", 2048, r"no calibration of engine triton \(engines: mlx\)"),
    ],
)
def test_what_is_missing_is_said(store: Store, device: str, engine: str, hidden: int, message: str) -> None:
    with pytest.raises(MoeplanError, match=message) as caught:
        load_calibration(store, device, engine, shape(hidden=hidden))
    assert "\n" not in str(caught.value)


def test_header_must_name_the_folders_device(store: Store, tmp_path: Path) -> None:
    arms = samples(lambda n, u, s: 1e-6 * s, counts=(1, 2, 4))
    write_journal(tmp_path / "calibration/toy/triton-3.5/moe.jsonl", arms, device="h200", engine="triton")
    with pytest.raises(MoeplanError, match=r"moe\.jsonl: header: device 'h200' is not the folder's device 'toy'"):
        load_calibration(store, "toy", "triton", shape())


def test_journals_that_disagree_do_not_mix(store: Store, tmp_path: Path) -> None:
    arms = samples(lambda n, u, s: 1e-6 * s, counts=(1, 2, 4))
    write_journal(tmp_path / "calibration/toy/mlx-0.10/more.jsonl", arms, engine_version="0.10", driver="580")
    with pytest.raises(MoeplanError, match=r"more\.jsonl: does not go with moe\.jsonl: driver"):
        load_calibration(store, "toy", "mlx", shape())


def test_stored_fits_answer_like_fresh_ones_until_a_journal_changes(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "calibration/toy/mlx-0.10"
    fresh = load_calibration(store, "toy", "mlx", shape())
    path = write_fits(folder)
    assert load_calibration(store, "toy", "mlx", shape()).fits == fresh.fits
    first = path.read_bytes()
    write_fits(folder)
    assert path.read_bytes() == first
    tampered = json.loads(first)
    tampered["fits"][0]["pieces"][0]["coefficients"][1]["value"] = 1.0
    path.write_text(json.dumps(tampered))
    assert plane_seconds(load_calibration(store, "toy", "mlx", shape())) == 1.0, "stored fits are used"
    with (folder / "moe.jsonl").open("a") as journal:
        journal.write(json.dumps({"type": "round"}) + "\n")
    assert plane_seconds(load_calibration(store, "toy", "mlx", shape())) == pytest.approx(2e-6, rel=1e-4)


def test_malformed_fits_name_the_remedy(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "calibration/toy/mlx-0.10"
    path = write_fits(folder)
    document = json.loads(path.read_text())
    del document["fits"][0]["band"]
    path.write_text(json.dumps(document))
    with pytest.raises(MoeplanError, match=r"fits\.json: malformed: .*moeplan calibrate fit"):
        load_calibration(store, "toy", "mlx", shape())


@pytest.mark.parametrize("fits", sorted(ROOT.glob("calibration/*/*/fits.json")), ids=lambda path: str(path.parent.name))
def test_shipped_fits_regenerate_byte_for_byte(fits: Path, tmp_path: Path) -> None:
    copy = tmp_path / fits.parent.parent.name / fits.parent.name
    copy.mkdir(parents=True)
    for journal in fits.parent.glob("*.jsonl"):
        (copy / journal.name).write_bytes(journal.read_bytes())
    (copy.parent / "device.toml").write_bytes((fits.parent.parent / "device.toml").read_bytes())
    assert write_fits(copy).read_bytes() == fits.read_bytes()


def test_every_shipped_journal_has_its_fits() -> None:
    folders = {path.parent for path in ROOT.glob("calibration/*/*/*.jsonl")}
    assert folders
    assert all((folder / "fits.json").is_file() for folder in folders)


def test_measured_points_come_before_fits(tmp_path: Path) -> None:
    wobble = tuple(1 + 0.01 * i for i in range(-5, 6))
    arms = [sample("gather", n, "uniform", 1e-5 * n, wobble=wobble) for n in (1, 2, 4)]
    arms += [sample("gather", 4, "uniform", 1.5e-5 * 4, wobble=wobble, seed=1)]
    arms += [sample("gather", 1, "identical", 1e-6, cache_resident=True)]
    write_journal(tmp_path / "toy/mlx-1.0/moe.jsonl", arms)
    found = load_calibration(Store(calibration=tmp_path), "toy", "mlx", shape())
    point = found.measured("gather", 2, "uniform")
    assert point is not None
    assert point.source == "measured"
    assert point.seconds == pytest.approx(2e-5)
    assert point.low == pytest.approx(2e-5 * 0.955)
    assert point.high == pytest.approx(2e-5 * 1.045)
    both = found.measured("gather", 4, "uniform")
    assert both is not None
    assert both.low < 4e-5, "two seeds that differ widen the range"
    assert both.high > 6e-5
    assert found.measured("gather", 1, "identical") is None, "served from the cache"
    assert found.measured("gather", 3, "uniform") is None
    assert found.measured("fused", 2, "uniform") is None


def test_path_without_fit_says_why(store: Store, tmp_path: Path) -> None:
    found = load_calibration(store, "toy", "mlx", shape(hidden=4096))
    with pytest.raises(MoeplanError, match=r"toy/mlx-0\.9: no fit of path gather: .*2 token counts"):
        found.estimate("gather", Drivers(1, 8, 8))
    with pytest.raises(MoeplanError, match=r"path fused was not timed \(timed: gather\)"):
        found.estimate("fused", Drivers(1, 8, 8))


def moeplan(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "moeplan", *words], capture_output=True, text=True, check=False)


def test_commands(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "calibration"
    done = moeplan("calibrate", "fit", "toy", "--calibration", str(root), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [Path(one["file"]).parent.name for one in document["files"]] == ["mlx-0.10", "mlx-0.9"]
    assert (root / "toy/mlx-0.9/fits.json").is_file()
    text = moeplan("calibrate", "fit", str(root / "toy/mlx-0.10")).stdout
    assert "gather: a + b*distinct" in text
    assert "held out: mean" in text

    done = moeplan("calibrate", "show", "--device", "toy", "--calibration", str(root), "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["device"] == "toy"
    row = next(r for r in shown["paths"] if (r["engine_version"], r["tokens"], r["routing"]) == ("0.10", 4, "disjoint"))
    wanted = {"path", "runner", "engine_version", "format", "model", "routing", "tokens", "median_s", "spread_s"}
    assert wanted | {"floor_s", "kernel_hash"} <= set(row)
    assert row["floor_s"] == pytest.approx(32 * 2_654_208 / 1e12)
    assert row["median_s"] == pytest.approx(30e-6 + 2e-6 * 32)
    assert {"path", "drivers", "holdout_mean", "holdout_p90", "valid"} <= set(shown["fits"][0])
    assert shown["fits"][0]["valid"] == [1, 8]


@pytest.mark.parametrize(
    "words",
    [
        ("calibrate", "fit", "nowhere"),
        ("calibrate", "show", "--device", "nowhere"),
        ("accuracy", "nowhere"),
    ],
)
def test_wrong_input_is_one_line(words: tuple[str, ...]) -> None:
    done = moeplan(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr
