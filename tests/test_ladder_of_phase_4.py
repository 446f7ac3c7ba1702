"""The steps of phase 4: texts that differ by one idea each, and are the kernel for their constants."""

import difflib

import pytest
import torch
from drawn import qkv
from test_house import load

from flashlab.attention.ladder import STEPS, text
from flashlab.attention.tiles import Tile


def lines(step):
    return [line for line in text(step).splitlines() if line.strip()]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_text_of_a_step_is_the_kernel_for_its_constants(step, tmp_path):
    file = tmp_path / f"{step.name}.py"
    file.write_text("import triton\nimport triton.language as tl\n" + text(step))
    kernel, tile = load(file).flash_attention_kernel, Tile(32, 32, 4, 2)
    inputs = qkv(1, 2, 1, 20, 180, step.head_dim, torch.float16)
    found, want = step.run(*inputs, tile=tile, kernel=kernel), step.run(*inputs, tile=tile)
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_each_step_is_one_idea_of_at_most_twenty_lines():
    for before, after in zip(STEPS, STEPS[1:], strict=False):
        diff = list(difflib.ndiff(lines(before), lines(after)))
        new = sum(line.startswith("+ ") for line in diff)
        gone = sum(line.startswith("- ") for line in diff)
        assert 1 <= new <= 20 and gone <= 8, f"{after.name}: {new} lines new, {gone} gone"
