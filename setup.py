"""What pyproject.toml cannot say: how README.md reads on an index, and the links of an sdist."""

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

LINKED = ("passes", "fake_impls")  # folders at the top that moe_ops has links to
# A link of Markdown to a file of this project, or a picture; an index has no such file.
TO_A_FILE = re.compile(r"!?\[([^\]]+)\]\((?!https?://)([^)#]+)[^)]*\)")


class WithLinks(sdist):
    """Manifests hold files alone, and tests import moe_ops.passes from where it is unpacked."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for name in LINKED:
            os.symlink(f"../{name}", Path(base_dir, "moe_ops", name))


def without_links(page: str) -> str:
    """The page with the path in brackets where a link to a file was; the sdist has the file."""
    return TO_A_FILE.sub(lambda m: m[1] if m[1] == m[2] else f"{m[1]} ({m[2]})", page)


setup(
    cmdclass={"sdist": WithLinks},
    long_description=without_links(Path(__file__).with_name("README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
)
