"""What every pytest run of the course needs: `src` on the path, a quiet environment, and nbval as we use it.

    python -m pytest --nbval --nbval-current-env --nbval-cell-timeout=300 --nbval-sanitize-with=nbval.cfg \
        notebooks/*.ipynb solutions/*.ipynb
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "src" / "lessons")]

import tools.no_grammars  # noqa: E402, F401
from kernel_environment import kernel_environment  # noqa: E402 (found through the line above)

# Unsolved on purpose: tests/test_notebooks.py runs them, made afresh from src/lessons.
collect_ignore_glob = ["exercises/*.ipynb"]

# Of a figure nothing is compared: it is drawn once, where a learner's is drawn four times, as a PNG and as an SVG, and
# before each to find its edges.
DRAWN_ONCE = """
from IPython.core.formatters import DisplayFormatter
c.DisplayFormatter.active_types = [kind for kind in DisplayFormatter().format_types if kind != "image/svg+xml"]
c.InlineBackend.print_figure_kwargs = {"bbox_inches": None}
"""

_scratch = None


def pytest_configure(config):
    global _scratch
    if config.getoption("nbval", default=False):
        _scratch = tempfile.mkdtemp(prefix="flashlab-nbval-")
        profile = Path(_scratch, "profile_default")
        profile.mkdir()
        (profile / "ipython_kernel_config.py").write_text(DRAWN_ONCE)
        os.environ.update(kernel_environment(ROOT, _scratch))
        from jupyter_client.provisioning import local_provisioner
        from nbval import kernel
        from tools.forked_kernels import Kernel, second_try

        local_provisioner.launch_kernel = Kernel
        kernel.start_new_kernel = second_try(kernel.start_new_kernel)
    else:
        os.environ["MPLBACKEND"] = "Agg"


def pytest_unconfigure():
    if _scratch:
        shutil.rmtree(_scratch, ignore_errors=True)


def pytest_collectstart(collector):
    # The build refuses a cell that writes to stderr; another machine's compiler may still have something to say there.
    if type(collector).__name__ == "IPyNbFile":
        collector.skip_compare += ("stderr", "image/svg+xml")
