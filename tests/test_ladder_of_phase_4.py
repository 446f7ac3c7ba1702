"""The steps of phase 4: texts that differ by one idea each, and are the kernel for their constants."""

import difflib
import importlib.util

import pytest
import torch

from flashlab import runtime
from flashlab.attention.ladder import STEPS, text
from flashlab.attention.tiles import Tile

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
