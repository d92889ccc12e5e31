"""Reports from elsewhere: the numbers that they are about come out of the scripts."""

import pytest

from examples.issues import lightning_19987, openclip_761
from examples.issues.sample_weights import in_words


def test_openclip_multiplies_the_temperatures_gradient() -> None:
    rows = openclip_761.table()
    assert {accum_freq for accum_freq, *_ in rows} > {1}
    for accum_freq, *found in rows:
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
