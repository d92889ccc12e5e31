#!/usr/bin/env bash
# Grain 0.2.18, WindowShuffleMapDataset(window_size=4) of ten elements: its page promises one shuffled index for each
# index. The last window is shuffled as if it was whole. It reaches beyond the end of the data, and an index beyond the
# end means the next epoch, that is the beginning of the data. So one pass yields elements of the beginning twice and
# never some of the end, unless window_size divides the length or the luck of the seed keeps the last window in place.
#
# Seen: ten elements, 1 among them twice, 9 never. With window_size=5 each once.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q grain==0.2.18
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
from grain import MapDataset
from grain.experimental import WindowShuffleMapDataset


def one_pass(window):
    return list(WindowShuffleMapDataset(MapDataset.source(list(range(10))), window_size=window, seed=0))


uneven = one_pass(4)
print("windows of 4:", uneven, "twice:", sorted(x for x in set(uneven) if uneven.count(x) > 1))
print("windows of 5:", one_pass(5))
assert len(uneven) == 10 and uneven.count(1) == 2 and 9 not in uneven
assert sorted(one_pass(5)) == list(range(10))
END
