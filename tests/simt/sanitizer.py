"""The kernels of kernels/mistakes.cu on a GPU, under compute-sanitizer's four tools: what each says first.

    python tests/simt/sanitizer.py OUT.json        (needs a GPU, nvcc and compute-sanitizer; a minute or two)

notes/emulator.md holds the table that this made, beside what the emulator finds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"
INCLUDE = Path(__file__).parents[2] / "src" / "flashlab" / "simt" / "include"
TOOLS = {
    "memcheck": ["--leak-check", "no"], "racecheck": ["--racecheck-report", "all"],
    "initcheck": [], "synccheck": [],
}  # fmt: skip
SECONDS = 60
MAIN = r"""
#include "mistakes.cu"
#include <dlfcn.h>
#include <stdio.h>
#include <vector>
int main(int, char** words) {
    auto run = (int (*)(const float*, float*, int))dlsym(RTLD_DEFAULT, words[1]);
    const int n = 4096;
    std::vector<float> numbers(n);
    for (int i = 0; i < n; i++) numbers[i] = i + 1;
    float *in, *out;
    cudaMalloc(&in, n * 4), cudaMalloc(&out, n * 4);
    cudaMemcpy(in, numbers.data(), n * 4, cudaMemcpyHostToDevice);
    cudaMemset(out, 0, n * 4);
    const int launched = run(in, out, 64), ended = cudaDeviceSynchronize();
    printf("result %d %d\n", launched, ended);
    return 0;
}
"""


def build(work: Path) -> Path:
    (work / "main.cu").write_text(MAIN)
    command = ["nvcc", "-arch=native", "-std=c++17", "-lineinfo", "-Xcompiler", "-rdynamic", "-w", "-ldl"]
    command += ["-I", str(KERNELS), "-I", str(INCLUDE), "-o", "mistakes", "main.cu"]
    subprocess.run(command, cwd=work, check=True)
    return work / "mistakes"


def said(program: Path, entry: str, tool: str | None) -> str:
    """The first thing that a tool says, without its numbers; "-" for nothing."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "3", *TOOLS[tool]] if tool else []
    try:
        done = subprocess.run([*command, str(program), entry], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "does not end"
    if tool is None:
        return " ".join(done.stdout.split()[-2:])
    lines = [x.removeprefix("========= ").strip() for x in done.stdout.splitlines() if x.startswith("=========")]
    first = next((x for x in lines if x and not re.match(r"COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY", x)), "-")
    return re.sub(r"0x[0-9a-f]+", "...", first)[:120]


def main() -> None:
    text = re.sub(r"#ifdef SIMT_EMULATED.*?#endif", "", (KERNELS / "mistakes.cu").read_text(), flags=re.S)
    names = re.findall(r"^(?:RUN\((\w+)|extern \"C\" int run_(\w+)\(const)", text, re.M)
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        jobs = [(a or b, tool) for a, b in names for tool in (None, *TOOLS)]
        with ThreadPoolExecutor(12) as pool:
            answers = pool.map(lambda job: said(program, f"run_{job[0]}", job[1]), jobs)
            found: dict[str, dict[str, str]] = {}
            for (name, tool), answer in zip(jobs, answers, strict=True):
                found.setdefault(name, {})[tool or "alone"] = answer
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} kernels")


if __name__ == "__main__":
    main()
