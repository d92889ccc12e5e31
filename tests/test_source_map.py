"""Each source file says where it is tested: by its name, or by a line in its head."""

import pytest
from source_map import ROOT, files_that_test, named_tests, sources


def test_each_file_of_the_package_has_its_tests() -> None:
    missing = [str(source) for source in sources() if not files_that_test(source)]
    assert missing == []


@pytest.mark.parametrize("source", sources(), ids=str)
def test_named_tests_are_there(source) -> None:
    for test in named_tests(source):
        assert (ROOT / test).is_file(), f"{source} names {test}"
