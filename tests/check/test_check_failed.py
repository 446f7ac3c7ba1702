"""CheckFailed: one sentence, one line in a notebook, and it survives a trip between processes."""

import pickle

from IPython.core.interactiveshell import InteractiveShell

from flashlab.check import CheckFailed


def test_it_pickles():
    again = pickle.loads(pickle.dumps(CheckFailed("no", diagnosis="tail-in-l", case="short")))
    assert isinstance(again, CheckFailed)
    assert (str(again), again.diagnosis, again.case) == ("no", "tail-in-l", "short")


def test_ipython_shows_one_line(capsys):
    shell = InteractiveShell.instance()
    shell.run_cell(
        "from flashlab.check import CheckFailed\n"
        "def deep():\n    raise CheckFailed('O is not rescaled', diagnosis='o-not-rescaled', case='a late maximum')\n"
        "deep()"
    )
    shown = capsys.readouterr().out.strip()
    assert "O is not rescaled" in shown and "a late maximum" in shown and "o-not-rescaled" in shown
    assert len(shown.splitlines()) == 1, shown
