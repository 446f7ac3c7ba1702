"""No published figure is without its counterpart."""

import pytest

from flashlab.bench import counterparts, published
from flashlab.bench.counterparts import RULES


@pytest.fixture(scope="module")
def found():
    return {name: counterparts.counterparts(name) for name in RULES}


def test_no_published_figure_is_without_its_counterpart(found):
    assert not [figure for pairs in found.values() for figure, ours in pairs if ours is None]


def test_every_figure_of_every_table_is_asked_for(found):
    assert set(RULES) == set(published.NAMES)
    for name, pairs in found.items():
        labels = [figure.label for figure, _ in pairs]
        columns = published.load(name)[0]
        figures = [c for c in columns if c.endswith("ms") or c in ("mem_before_mb", "avg_forward_s", "avg_backward_s")]
        cells = [row[c] for row in published.load(name) for c in figures or ["cuda_total"]]
        assert len(labels) == sum(cell is not None for cell in cells), name
        assert len(set(labels)) == len(labels) or name == "gqa_layer_profile"  # an operation is there twice
        assert all(figure.value is not None for figure, _ in pairs)
