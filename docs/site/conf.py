"""The site: pages where they are in this repository, and a reference made from docstrings.

Sphinx makes it, as it imports what it documents, and checks links and headings while it builds. The
root of the repository is its source, so a link from page to page is the same on the site and where
the repository is read. `make docs` builds it, and any warning ends that.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside this one

project = html_title = "moe_ops"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "commands", "docstrings"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**"]
exclude_patterns = [
    ".*", "benchmarks", "build", "dist", "examples", "fake_impls", "moe_ops", "passes", "tests",
]  # fmt: skip

myst_heading_anchors = 4  # links to headings, by the names that they have elsewhere

autodoc_default_options = {"member-order": "bysource"}
autodoc_preserve_defaults = True  # as they are written, not a record in full
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_function_parentheses = False
toc_object_entries_show_parents = "hide"
nitpick_ignore_regex = [(r"py:class", r".*")]  # types in signatures, most of them torch's

html_theme = "furo"
html_extra_path = ["front"]  # the page at the top, which leads to the first one
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_exclude = ".gp, .go"  # prompts, and what is shown behind them
