"""A plugin for pytest, imported before nbval's by `-p tools.no_grammars`, and by the conftest.py of the root.

jsonschema, which nbformat imports, builds grammars of web addresses with this package: a second in each process,
and no notebook needs them.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)
