import torch
from torch.nn.functional import cross_entropy

from lightning_ga.models import HashedPatchClassifier
from lightning_ga.models.classifier import HashedPatches


def test_a_patch_has_its_row_by_its_look_and_its_place():
    """Equal pictures have equal rows; a pixel that changes, changes the patches that it lies in."""
    hashed = HashedPatches(200_000)
    picture = torch.rand(1, 1, 9, 9)
    other = picture.clone()
    other[0, 0, 0, 0] = 1 - picture[0, 0, 0, 0].round()
    rows, others = hashed(picture), hashed(other)
    assert rows.shape == (1, 16)
    assert hashed(picture).equal(rows)
    assert (rows != others).flatten().tolist() == [True] + [False] * 15
    assert len(set(hashed(torch.zeros(1, 1, 9, 9)).flatten().tolist())) == 16


def test_the_gradient_holds_the_touched_rows_alone():
    """And its values are those of a dense one."""
    images, targets = torch.rand(4, 1, 28, 28), torch.arange(4)
    gradients = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = HashedPatchClassifier(5000, 8, sparse=sparse)
        cross_entropy(model(images), targets).backward()
        gradients.append(model.net[1].weight.grad)
    assert gradients[0].is_sparse
    rows = HashedPatches(5000)(images).unique()
    assert gradients[0].coalesce().indices().flatten().equal(rows)
    torch.testing.assert_close(gradients[0].to_dense(), gradients[1])
