"""The files that `wide launch` writes, with their gaps: text in the folder `files`, `{{name}}` where something is to be
filled in. Whoever fills in a value quotes it for the language of that file.
"""

from __future__ import annotations

import re
from importlib import resources


def filled(file: str, **values: object) -> str:
    """That file, with every gap filled; a line that is nothing but an empty gap is left out."""
    text = (resources.files("wide.launch") / "files" / file).read_text(encoding="utf-8")
    empty = "|".join(name for name, value in values.items() if value == "")
    if empty:
        text = re.sub(rf"(?m)^ *\{{\{{({empty})\}}\}}\n", "", text)
    return re.sub(r"\{\{(\w+)\}\}", lambda gap: str(values[gap[1]]), text)
