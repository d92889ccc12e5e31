import random

from sklearn.metrics import classification_report

from lightning_ga.app.scores import class_report


def test_scores_are_those_of_scikit_learn():
    """Per class, macro and weighted, with a class that is never predicted and one without samples."""
    draw = random.Random(0)
    targets = [draw.choice([0, 1, 2]) for _ in range(200)]
    predictions = [draw.choice([target, 1, 3]) for target in targets]
    predictions = [3 if prediction == 2 else prediction for prediction in predictions]
    confusion = [[0] * 4 for _ in range(4)]
    for target, prediction in zip(targets, predictions):
        confusion[target][prediction] += 1
    expected = classification_report(targets, predictions, labels=[0, 1, 2, 3], output_dict=True, zero_division=0)
    assert class_report(confusion)[1] == expected


def test_scores_are_told_with_the_names_of_classes():
    text, _ = class_report([[2, 0], [1, 1]], ["cat", "dog"])
    assert "cat     0.6667    1.0000    0.8000         2" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "0     0.6667    1.0000    0.8000         2" in class_report([[2, 0], [1, 1]], ["cat"])[0]
