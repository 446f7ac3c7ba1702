"""The steps of phase 4: texts that differ by one idea each, and are the kernel for their constants."""

import difflib
import importlib.util
import textwrap

import pytest
import torch
import triton

from flashlab import runtime
from flashlab.attention.ladder import STEPS, text
from flashlab.attention.tiles import Tile
from flashlab.triton_tools.specialised import specialised

HEAD = "import triton\nimport triton.language as tl\n\n\n"


def lines(step):
    return [line for line in text(step).splitlines() if line.strip()]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_text_of_a_step_is_the_kernel_for_its_constants(step, tmp_path):
    file = tmp_path / f"{step.name}.py"
    file.write_text(HEAD + text(step))
    spec = importlib.util.spec_from_file_location(step.name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, heads, rows, step.head_dim, generator=generator).to(runtime.device(), torch.float16)
        for heads, rows in ((2, 20), (1, 180), (1, 180))
    )
    tile = Tile(32, 32, 4, 2)
    for got, want in zip(
        step.run(q, k, v, tile=tile, kernel=module.flash_attention_kernel), step.run(q, k, v, tile=tile), strict=True
    ):
        assert torch.equal(got, want)


def test_each_step_is_one_idea_of_at_most_twenty_lines():
    for before, after in zip(STEPS, STEPS[1:], strict=False):
        diff = list(difflib.ndiff(lines(before), lines(after)))
        new = sum(line.startswith("+ ") for line in diff)
        gone = sum(line.startswith("- ") for line in diff)
        assert 1 <= new <= 20 and gone <= 8, f"{after.name}: {new} lines new, {gone} gone"


def test_what_is_decided_and_what_is_left():
    @triton.jit
    def kernel(A, B, C):
        # a comment
        if A and B < 2:
            x = 1  # one
        elif C:
            # above two
            x = 2
        elif A:
            x = 3
        else:
            x = 4
        for i in range(3):
            if not A:
                x += i
        return x

    def shown(**constants):
        body = specialised(kernel, **constants).partition("# a comment\n")[2]
        return textwrap.dedent(body)

    loop = "for i in range(3):\n"
    assert shown(A=True, B=1) == f"x = 1  # one\n{loop}return x\n"
    assert shown(A=False, C=True) == f"# above two\nx = 2\n{loop}    x += i\nreturn x\n".replace("# above two\n", "")
    assert shown(A=False).startswith("if C:\n    # above two\n    x = 2\nelse:\n    x = 4\n")
    assert shown(A=True, B=3, C=False).startswith("x = 3\n")
    assert shown() == textwrap.dedent(specialised(kernel).partition("# a comment\n")[2])
    with pytest.raises(KeyError, match="kernel has no parameter D"):
        specialised(kernel, D=1)
