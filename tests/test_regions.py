"""Named regions of a source: where they are, and that their markers are never seen."""

import pytest

from flashlab.kernels.regions import Region, edited, region_text, regions, replace

KERNEL = """\
#include "simt.h"
// region: main loop
for (int j = 0; j < tiles; j++) {
    // region: scores
    s += q * k;
    // endregion

    // region: update of O
    o += p * v;
    // endregion
}
// endregion
"""


def test_a_region_that_begins_with_a_region():
    nested = "// region: a\n// region: b\nx\n// endregion\ny\n// endregion\n"
    assert regions(nested) == {"a": Region(3, 5), "b": Region(3, 3)}


def test_prose_about_a_region_is_no_marker():
    assert regions("// The region: what a warp holds.\n// endregions are far\nint x;\n") == {}


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("x\n// region: a\ny\n", "line 2: the region 'a' has no endregion"),
        ("x\n// endregion\n", "line 2: an endregion without a region"),
        ("// region: a\nx\n// endregion\n// region: a\ny\n// endregion\n", "line 4: the region 'a' has begun before"),
        ("// region:\nx\n// endregion\n", "line 1: a region needs a name"),
        ("// region: a\n\n// endregion\n", "line 1: the region 'a' holds no line"),
        ("// region: a\n// region: a\nx\n// endregion\n// endregion\n", "line 2: the region 'a' has begun before"),
    ],
)
def test_malformed_regions(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        regions(text)


def test_a_region_is_replaced_with_what_is_inside_it():
    text, where = replace(KERNEL, "main loop", "\nwork();\nmore();\n")
    assert text == '#include "simt.h"\n// region: main loop\nwork();\nmore();\n// endregion\n' and where == Region(3, 4)
    text, where = replace(KERNEL, "scores", "    s = 0;")
    assert where == Region(5, 5) and text.splitlines()[4] == "    s = 0;" and regions(text) == regions(KERNEL)
    assert replace(KERNEL, "scores", region_text(KERNEL, "scores"))[0] == KERNEL


def test_an_exhibit_has_its_own_head_and_regions_and_the_rest_of_its_step():
    step = KERNEL.replace("o += p * v;", "o += p * v;  // New").replace("s += q * k;", "s += q * k;  // New: a sum")
    inner = "    s = 0;  // New\n    // region: more\n    t = 0;\n    // endregion\n"
    text = edited(step, f"// an exhibit\n\n    // region: scores\n{inner}    // endregion\n")
    assert text.startswith("// an exhibit\n\n// region: main loop\n") and "simt.h" not in text
    assert region_text(text, "scores") == "    s = 0;  // New\n    t = 0;\n"
    assert region_text(text, "more") == "    t = 0;\n"
    assert region_text(text, "update of O") == "    o += p * v;\n"
    assert "q * k;  // a sum" in edited(step, "// region: update of O\nx\n// endregion\n")


def test_what_cannot_be_replaced():
    with pytest.raises(KeyError, match="no region 'copy'; its regions: 'main loop'"):
        replace(KERNEL, "copy", "x")
    with pytest.raises(ValueError, match="nothing to put in the place of the region 'scores'"):
        replace(KERNEL, "scores", "\n")
