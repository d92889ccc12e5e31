"""Reports from elsewhere: the numbers that they are about come out of the scripts."""

import json
from pathlib import Path

import pytest
from forks import forked

from examples.issues import lightning_19987, openclip_761, rf_detr_916
from examples.issues.sample_weights import in_words


def test_openclip_multiplies_the_temperatures_gradient() -> None:
    for accum_freq, *found in openclip_761.table():
        assert found == pytest.approx([1, accum_freq, 1, 1], rel=1e-9)


def test_lightning_divides_the_last_window_by_the_full_factor() -> None:
    """Half of the gradient of two batches out of four; in a smaller last batch a sample weighs as two others do."""
    found = {who: in_words(windows[-1]) for who, windows in lightning_19987.table().items()}
    assert list(found.values()) == [
        "8 samples: 0.500",
        "8 samples: 1.000",
        "6 samples: 0.375 to 0.750",
        "6 samples: 1.000",
    ]


def write_table(path: str) -> None:
    words = {who: [in_words(window) for window in windows] for who, windows in rf_detr_916.table().items()}
    Path(path).write_text(json.dumps(words))


@pytest.mark.distributed
def test_under_data_parallelism_the_last_window_is_short(tmp_path: Path) -> None:
    """3/4 of its gradient with ``drop_last``; ours is right, and ``drop_last`` leaves out what is no full window."""
    ended = forked(write_table, str(tmp_path / "table.json"), folder=tmp_path)
    assert ended.code == 0, ended.output
    stock, repeated, ours, dropped = json.loads((tmp_path / "table.json").read_text()).values()
    full = "16 samples: 1.000"
    assert stock == [full, full, "12 samples: 0.750"]
    assert len(repeated) == 3
    assert ours == [full, full, "12 samples: 1.000"]
    assert dropped == [full, full]
