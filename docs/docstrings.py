"""Makes the docstrings, which are written to be read in the source, fit for the API page."""

import re

import griffe


class Markup(griffe.Extension):
    """Drops marks that mkdocstrings would show as they are."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Called by griffe for everything that it has read."""
        if obj.is_alias or obj.docstring is None:
            return
        # A reference, [`~package.module.Name`], becomes `Name`.
        text = re.sub(r"\[`~?(?:\w+\.)*(\w+)`\]", r"`\1`", obj.docstring.value)
        # Types are set as code anyway: `name (`int`, *optional*):` becomes `name (int, optional):`.
        obj.docstring.value = re.sub(r"^(\s+\w+ )(\(.+?\))(?=: )", without_marks, text, flags=re.MULTILINE)


def without_marks(match: re.Match) -> str:
    """The line of an argument with a plain type."""
    return match[1] + re.sub(r"[`*]", "", match[2])
