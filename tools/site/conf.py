"""Sphinx's configuration. The source folder is the repository's root, so that links between pages
of docs/ and to files beside it are the same here and on GitHub.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sgl_vllm.version import __version__

project = "sgl-vllm"
author = "The sgl-vllm authors"
version = release = __version__
html_title = f"sgl-vllm {release}"

extensions = ["myst_parser", "tools.site.navigation"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "benchmarks/results/studies.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "GOVERNANCE.md",
    "SECURITY.md",
]
source_suffix = {".md": "markdown"}
highlight_language = "none"
smartquotes = False  # `--flag` stays two hyphens
myst_heading_anchors = 4

html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "logo": {"text": "sgl-vllm"},
    "navbar_start": ["navbar-logo", "version"],
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["license"],
    "footer_end": [],
    "search_as_you_type": True,
}
html_sidebars = {"**": ["all-pages"]}
templates_path = ["templates"]
html_context = {"default_mode": "auto"}  # light or dark like the system
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_domain_indices = False
