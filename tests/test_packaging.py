"""What an index and an sdist get of the project, and under which name it is installed."""

import email
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

import moe_ops
from tests.sources import LINKED, ROOT, files

# How to install us, with an extra or without; quoted in a shell, escaped in a pattern of a test.
INSTALLS = re.compile(r"pip install '?([\w-]*moe-ops)(?:\\?\[(\w+)\\?\])?")


@pytest.fixture(scope="module")
def egg_info(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what setuptools makes of the project before it builds anything."""
    base = tmp_path_factory.mktemp("egg")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(base)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return base / "torch_moe_ops.egg-info"


@pytest.fixture(scope="module")
def metadata(egg_info: Path) -> Message:
    return email.message_from_string((egg_info / "PKG-INFO").read_text())


def test_an_sdist_holds_every_file(egg_info: Path) -> None:
    listed = (egg_info / "SOURCES.txt").read_text().splitlines()
    links = {f"moe_ops/{link}" for link in LINKED}  # setup.py adds these to the archive
    made = {name for name in listed if ".egg-info/" in name or name == "setup.cfg"}
    assert set(files()) - links == set(listed) - made


def test_name_and_version(metadata: Message) -> None:
    assert metadata["Name"] == "torch-moe-ops"
    assert metadata["Version"] == moe_ops.__version__


def test_links_of_the_readme_lead_somewhere_on_an_index(metadata: Message) -> None:
    page = metadata.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert not [link for link in links if not link.startswith("https://")]
    assert "docs/FAMILIES.md" in page


def test_what_messages_and_pages_say_to_install_is_ours(metadata: Message) -> None:
    said = {
        (match, name)
        for name in files()
        if name.endswith((".py", ".md"))
        for match in INSTALLS.findall((ROOT / name).read_text())
    }
    extras = set(metadata.get_all("Provides-Extra"))
    assert {extra for (_, extra), _ in said} >= {"bench", "debug", "flashinfer", "gguf"}
    wrong = [s for s in said if s[0][0] != metadata["Name"] or s[0][1] not in {"", *extras}]
    assert not wrong
