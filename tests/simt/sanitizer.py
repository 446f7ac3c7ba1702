"""The kernels of kernels/mistakes.cu on a GPU, under compute-sanitizer's four tools: what each says first.

    python tests/simt/sanitizer.py OUT.json [SECONDS]     (needs a GPU, nvcc and compute-sanitizer; a minute or two)

After SECONDS (300) what is left is not tried; what OUT.json already has is kept, so that a second run goes on.

sanitizer_h200.json is what it wrote on an H200; notes/emulator.md sums it up, beside what the emulator finds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"
FLASHLAB = Path(__file__).parents[2] / "src" / "flashlab"
TOOLS = {
    "memcheck": ["--leak-check", "no"], "racecheck": ["--racecheck-report", "all"],
    "initcheck": [], "synccheck": [],
}  # fmt: skip
ALONE, NOT_TRIED = "alone", "not tried"
EACH = 20  # seconds, then it "does not end"
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
    command += [
        "-I",
        str(KERNELS),
        "-I",
        str(FLASHLAB / "simt/include"),
        "-I",
        str(FLASHLAB / "kernels/ptx"),
        "-o",
        "mistakes",
        "main.cu",
    ]
    subprocess.run(command, cwd=work, check=True)
    return work / "mistakes"


def said(program: Path, entry: str, tool: str) -> str:
    """The first thing that a tool says, without its numbers; "-" for nothing."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "3", *TOOLS[tool]] if tool != ALONE else []
    running = subprocess.Popen(
        [*command, str(program), entry],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # the tool starts the program: both are to end
    )
    try:
        printed, _ = running.communicate(timeout=EACH)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        return "does not end"
    if tool == ALONE:
        return " ".join(printed.split()[-2:])
    lines = [x.removeprefix("========= ").strip() for x in printed.splitlines() if x.startswith("=========")]
    first = next((x for x in lines if x and not re.match(r"COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY", x)), "-")
    return re.sub(r"0x[0-9a-f]+", "...", first)[:120]


def main() -> None:
    text = re.sub(r"#ifdef SIMT_EMULATED.*?#endif", "", (KERNELS / "mistakes.cu").read_text(), flags=re.S)
    names = re.findall(r"^(?:RUN\((\w+)|extern \"C\" int run_(\w+)\(const)", text, re.M)
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        out = Path(sys.argv[1])
        found: dict[str, dict[str, str]] = json.loads(out.read_text()) if out.exists() else {}
        known = {(name, tool) for name, says in found.items() for tool in says if says[tool] != NOT_TRIED}
        jobs = [(a or b, tool) for a, b in names for tool in (ALONE, *TOOLS)]
        jobs = [job for job in jobs if job not in known]
        end = time.monotonic() + (float(sys.argv[2]) if len(sys.argv) > 2 else 300)

        def answer_of(job: tuple[str, str]) -> str:
            return said(program, f"run_{job[0]}", job[1]) if time.monotonic() < end else NOT_TRIED

        with ThreadPoolExecutor(12) as pool:
            answers = pool.map(answer_of, jobs)
            for (name, tool), answer in zip(jobs, answers, strict=True):
                found.setdefault(name, {})[tool] = answer
    out.write_text(json.dumps(found, indent=1) + "\n")
    left = sum(NOT_TRIED in says.values() for says in found.values())
    print(f"{len(found)} kernels, {left} of them not tried")


if __name__ == "__main__":
    main()
